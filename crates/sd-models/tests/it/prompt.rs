//! Token numbers against the reference's, and prompts that cannot be read.

use serde_json::Value;

use sd_models::qwen_image_2_1::PromptTokenizer;
use sd_models::qwen3_vl::Config;

use crate::fixtures::{folder, tiny};

fn tokenizer() -> PromptTokenizer {
    let config = Config::read(&tiny().join("text_encoder/config.json")).unwrap();
    PromptTokenizer::read(&tiny().join("processor/tokenizer.json"), &config).unwrap()
}

#[test]
fn token_numbers_are_the_references() {
    let tokenizer = tokenizer();
    let text =
        std::fs::read_to_string(folder("qwenimage21_pipeline").join("token_ids.json")).unwrap();
    let recorded: Value = serde_json::from_str(&text).unwrap();
    let cases = recorded["cases"].as_array().unwrap();
    assert!(cases.len() >= 25);
    for case in cases {
        let (name, prompt) = (
            case["name"].as_str().unwrap(),
            case["prompt"].as_str().unwrap(),
        );
        let outcome = tokenizer.tokenize(prompt);
        if case["error"].is_string() {
            assert!(outcome.is_err(), "{name}");
            continue;
        }
        let should: Vec<i32> = case["ids"]
            .as_array()
            .unwrap()
            .iter()
            .map(|id| id.as_i64().unwrap() as i32)
            .collect();
        if should.len() > 4096 {
            // The reference warns and goes on beyond what its text encoder was made for.
            assert!(
                outcome
                    .unwrap_err()
                    .to_string()
                    .contains("reads at most 4096"),
                "{name}"
            );
            continue;
        }
        let tokenized = outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(tokenized.ids, should, "{name}");
        assert_eq!(
            tokenized.system_tokens as u64,
            recorded["system_tokens_dropped"].as_u64().unwrap()
        );
    }
}

#[test]
fn prompts_that_cannot_be_read_say_why() {
    let tokenizer = tokenizer();
    for (prompt, expected) in [
        ("a <|image_pad|> here".to_owned(), "<|image_pad|>"),
        ("<|video_pad|>".to_owned(), "<|video_pad|>"),
        ("circle ".repeat(5000), "the model reads at most 4096"),
    ] {
        let text = tokenizer.tokenize(&prompt).unwrap_err().to_string();
        assert!(
            text.starts_with("the prompt") && text.contains(expected),
            "{text}"
        );
    }
    assert_eq!(
        tokenizer.tokenize("").unwrap(),
        tokenizer.tokenize(" ").unwrap()
    );
}
