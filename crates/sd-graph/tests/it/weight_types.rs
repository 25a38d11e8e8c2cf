//! Which type a weight gets: what was asked for by default and by name, what its use allows, what its rows have room for.

use sd_backend::DType;
use sd_graph::{
    Checkpoint, Declarations, LoadOptions, Role, StoredType, TensorTypes, WeightTypeError,
    weight_type,
};

use DType::{BF16, F16, F32, Iq3S, Iq4Nl, Q2K, Q4_0, Q4K, Q5_0, Q5K, Q6K, Q8_0};

fn rules(text: &str) -> TensorTypes {
    text.parse().unwrap()
}

#[test]
fn the_first_rule_that_fits_decides() {
    let name = "transformer.transformer_blocks.3.attn.to_q.weight";
    for (text, expected) in [
        (r"transformer_blocks\..*attn=q8_0,.*=f16", Some(Q8_0)),
        (r".*=f16,transformer_blocks\..*attn=q8_0", Some(F16)),
        ("attn=Q4_K", Some(Q4K)),
        ("^attn=q8_0", None),
        (r"^transformer\.=q8_0", Some(Q8_0)),
        (r"^vae\.=f32, to_[qk]\.weight$ = bf16", Some(BF16)),
        // Commas and equals signs in patterns.
        (r"blocks\.\d{1,2}\.attn=q4_0", Some(Q4_0)),
        (r"blocks\.\d{2,3}\.attn=q4_0,to_(q|=,)=q5_0", Some(Q5_0)),
        ("to_[=q]=q5_0", Some(Q5_0)),
    ] {
        assert_eq!(rules(text).of(name), expected, "{text}");
    }
    assert!(TensorTypes::default().is_empty() && !rules("a=f16").is_empty());
    let made = TensorTypes::default().rule("a", F16).unwrap();
    assert_eq!((made.of("xax"), made.of("x")), (Some(F16), None));
}

#[test]
fn wrong_texts_are_named() {
    for (text, parts) in [
        ("attn=q9_0", ["`q9_0` is no type", "f32, f16, bf16, q4_0"]),
        ("attn=i8", ["`i8` is no type", "mxfp4"]),
        ("attn=iq2_xs", ["`iq2_xs` is no type", "iq4_nl"]),
        ("attn", ["`attn` has not the form PATTERN=TYPE", "q8_0"]),
        ("", ["`` has not the form", ""]),
        ("=q8_0", ["`=q8_0` has not the form", ""]),
        ("attn=", ["`attn=` has not the form", ""]),
        ("attn=q8_0,", ["`` has not the form", ""]),
        (
            "(a=q8_0",
            [
                "the pattern `(a` is no regular expression",
                "unclosed group",
            ],
        ),
        (
            r"(\w{900}){900}=q8_0",
            ["no regular expression", "size limit"],
        ),
    ] {
        let error = text.parse::<TensorTypes>().unwrap_err();
        let shown = error.to_string();
        assert!(
            parts.iter().all(|part| shown.contains(part)),
            "{text}: {shown}"
        );
        assert!(!shown.contains('\n'), "{shown}");
    }
    assert_eq!(weight_type(" Q4_k "), Ok(Q4K));
    let unknown = WeightTypeError::UnknownType {
        text: "q9".to_owned(),
    };
    assert_eq!(weight_type("q9"), Err(unknown));
}

#[test]
fn use_and_rows_limit_what_is_asked_for() {
    use Role::{Kernel, Matrix, Table, Vector};
    use StoredType as S;
    // Stored type, use, row, type asked for: type in memory, and whether it is reported as another one than that.
    type Case = (StoredType, Role, usize, Option<DType>, DType, bool);
    #[rustfmt::skip]
    let cases: &[Case] = &[
        (S::F32, Matrix, 100, None, F32, false),
        (S::F64, Matrix, 100, None, F32, false),
        (S::BF16, Matrix, 100, None, BF16, false),
        (S::F8E4M3, Matrix, 100, None, F16, false),
        (S::F8E5M2, Table, 100, None, F16, false),
        (S::F8E4M3, Kernel, 3, None, F16, false),
        (S::F8E4M3, Vector, 100, None, F32, false),
        (S::I64, Vector, 1, None, F32, false),
        (S::F8E8M0, Vector, 4, Some(F16), F32, false),
        (S::Iq3S, Matrix, 256, None, Iq3S, false),
        (S::Iq3S, Matrix, 256, Some(Iq3S), Iq3S, false),
        (S::Iq3S, Table, 256, None, Iq3S, false),
        (S::Iq3S, Table, 256, Some(Q4K), Q8_0, true),
        // As asked.
        (S::F32, Matrix, 256, Some(Q4K), Q4K, false),
        (S::BF16, Matrix, 64, Some(Q8_0), Q8_0, false),
        (S::Q8_0, Matrix, 256, Some(Q4K), Q4K, false),
        (S::F16, Matrix, 5, Some(BF16), BF16, false),
        (S::F32, Table, 64, Some(Q4_0), Q4_0, false),
        // Rows that are not whole super-blocks, and not whole blocks.
        (S::F32, Matrix, 96, Some(Q4K), Q5_0, true),
        (S::F32, Matrix, 96, Some(Q5K), DType::Q5_1, true),
        (S::F32, Matrix, 96, Some(Q6K), Q8_0, true),
        (S::F32, Matrix, 96, Some(Q2K), Iq4Nl, true),
        (S::F32, Matrix, 96, Some(DType::Iq4Xs), Iq4Nl, true),
        (S::F32, Matrix, 100, Some(Q4K), F16, true),
        (S::F32, Matrix, 100, Some(Q8_0), F16, true),
        (S::BF16, Matrix, 100, Some(Q8_0), BF16, true),
        (S::F16, Matrix, 1, Some(Q8_0), F16, true),
        // Not every device takes rows from these.
        (S::F32, Table, 256, Some(Q4K), Q8_0, true),
        (S::F32, Table, 256, Some(Iq4Nl), Q8_0, true),
        (S::BF16, Table, 100, Some(Q4K), BF16, true),
        // Kernels and vectors.
        (S::F32, Kernel, 3, Some(Q8_0), F32, false),
        (S::F16, Kernel, 3, Some(Q8_0), F16, false),
        (S::BF16, Kernel, 3, Some(BF16), F32, false),
        (S::BF16, Kernel, 3, Some(F16), F16, false),
        (S::F16, Kernel, 3, Some(F32), F32, false),
        (S::BF16, Vector, 256, Some(Q8_0), F32, false),
    ];
    for &(stored, role, row, asked, expected, reported) in cases {
        let table = [("w".to_owned(), stored, vec![2, row])];
        let checkpoint = Checkpoint::from_table("t", table).unwrap();
        let mut options = LoadOptions::default().component("part");
        options.weight_type = asked;
        let declarations = Declarations::new(&checkpoint, options);
        let param = declarations.root().param("w", [2, row], role);
        let what = format!("{stored} {role:?} of {row} as {asked:?}");
        assert_eq!(param.dtype(), expected, "{what}");
        let fallbacks = declarations.fallbacks();
        assert_eq!(fallbacks.len(), usize::from(reported), "{what}");
        if let [fallback] = &fallbacks[..] {
            let text = format!("part.w is {expected} instead of {}", asked.unwrap());
            assert_eq!(fallback.to_string(), text);
        }
        declarations.finish().unwrap();
    }
}

#[test]
fn what_cannot_be_made_is_told_with_what_was_asked_for() {
    for (stored, asked, expected) in [
        (StoredType::I8, None, "w (I8)"),
        (StoredType::I64, Some(F16), "w (I64 as f16)"),
        (StoredType::F32, Some(Iq3S), "w (F32 as iq3_s)"),
        (StoredType::F4, None, "w (F4)"),
        (StoredType::Q8_1, Some(F32), "w (q8_1 as f32)"),
    ] {
        let table = [("w".to_owned(), stored, vec![2, 256])];
        let checkpoint = Checkpoint::from_table("t", table).unwrap();
        let mut options = LoadOptions::default();
        options.weight_type = asked;
        let declarations = Declarations::new(&checkpoint, options);
        declarations.root().param("w", [2, 256], Role::Matrix);
        let error = declarations.finish().unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn rules_come_before_the_default_and_see_full_names() {
    let names = [
        "blocks.0.attn.to_q.weight",
        "blocks.0.mlp.weight",
        "proj_out.weight",
    ];
    let table = names.map(|name| (name.to_owned(), StoredType::F32, vec![2, 64]));
    let checkpoint = Checkpoint::from_table("t", table).unwrap();
    let options = LoadOptions::default()
        .component("transformer")
        .weight_type(Q8_0)
        .tensor_types(rules(r"^transformer\.proj_out=f32"))
        .tensor_types(rules("^blocks=q4_0,attn=bf16,proj_out=q5_0"));
    let declarations = Declarations::new(&checkpoint, options);
    let params = names.map(|name| declarations.root().param(name, [2, 64], Role::Matrix));
    assert_eq!(params.map(|param| param.dtype()), [BF16, Q8_0, F32]);
}
