//! A program whose ggml is a library finds it beside itself, where its backends are.

#![allow(
    clippy::print_stdout,
    reason = "it is how a build script speaks to cargo"
)]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |variable: &str| std::env::var_os(variable).is_some();
    if !is("CARGO_FEATURE_DYNAMIC_BACKENDS") || !is("CARGO_CFG_UNIX") {
        return;
    }
    let here = if std::env::var("CARGO_CFG_TARGET_VENDOR").is_ok_and(|vendor| vendor == "apple") {
        "@executable_path"
    } else {
        "$ORIGIN"
    };
    for folder in [here.to_owned(), format!("{here}/../lib")] {
        println!("cargo::rustc-link-arg-bins=-Wl,-rpath,{folder}");
    }
}
