//! Libraries that are no backend of this program: each is refused with its reason.

use std::path::Path;
use std::process::Command;

use sd_backend::{Device, Error};

/// Compiles `source` to a library that looks like ggml's backend `name`. The compiler that built ggml is there.
fn library(folder: &Path, name: &str, source: &str) {
    let file = folder.join(format!("{name}.c"));
    std::fs::write(&file, source).unwrap();
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(folder.join(format!("libggml-{name}.so")))
        .arg(&file)
        .status()
        .unwrap();
    assert!(compiled.success());
}

const REGISTRATION: &str = "
    struct reg { int api_version; const char * (*name)(void *); unsigned long (*count)(void *);
                 void * (*get)(void *, unsigned long); void * (*proc)(void *, const char *); void * context; };
    static const char * name(void * reg) { (void) reg; return \"Pretended\"; }
    static unsigned long count(void * reg) { (void) reg; return 0; }
";

fn init(api_version: u32) -> String {
    format!(
        "{REGISTRATION}
        static struct reg registration = {{ {api_version}, name, count, 0, 0, 0 }};
        void * ggml_backend_init(void) {{ return &registration; }}"
    )
}

#[test]
fn libraries_that_do_not_fit_are_refused_with_their_reasons() {
    for (name, source, part) in [
        ("empty", "int nothing;".to_owned(), "no backend"),
        (
            "null",
            "void * ggml_backend_init(void) { return 0; }".to_owned(),
            "did not start",
        ),
        ("interface", init(1), "version 1 of ggml's interface"),
        (
            "older",
            format!(
                "const char * ggml_version(void) {{ return \"0.1.0\"; }} {}",
                init(3)
            ),
            "of ggml 0.1.0",
        ),
        (
            "elsewhere",
            format!("int ggml_backend_score(void) {{ return 0; }} {}", init(3)),
            "another kind of processor",
        ),
        (
            "unlinked",
            "void missing(void); void * ggml_backend_init(void) { missing(); return 0; }"
                .to_owned(),
            "missing",
        ),
    ] {
        let folder = tempfile::tempdir().unwrap();
        library(folder.path(), name, &source);
        let error = Device::load_backends(folder.path()).unwrap_err();
        assert!(matches!(error, Error::Libraries { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains(part) && text.contains(name),
            "`{part}` in `{text}`"
        );
    }
}

#[test]
fn the_best_variant_is_taken_and_the_rest_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    library(folder.path(), "broken", "int nothing;");
    for (name, score) in [("pretended-a", 1), ("pretended-b", 5), ("pretended-c", 0)] {
        // Only the best one starts: the others would end this process.
        let body = if score == 5 {
            "return &registration;"
        } else {
            "__builtin_trap();"
        };
        library(
            folder.path(),
            name,
            &format!(
                "{REGISTRATION}
                static struct reg registration = {{ 3, name, count, 0, 0, 0 }};
                int ggml_backend_score(void) {{ return {score}; }}
                void * ggml_backend_init(void) {{ {body} }}"
            ),
        );
    }
    // A backend without devices here, such as CUDA's without a card, is no error; nor is what lies beside it.
    assert_eq!(Device::load_backends(folder.path()), Ok(vec![]));
    assert_eq!(Device::load_backends(folder.path()), Ok(vec![]));
}
