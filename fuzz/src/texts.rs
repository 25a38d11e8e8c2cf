//! Texts that people write on a command line.

use sd_backend::MemoryBudgets;
use sd_graph::TensorTypes;

/// Reads `bytes` as budgets of memory.
pub fn budget(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    match text.parse::<MemoryBudgets>() {
        Ok(_) => assert!(text.trim() != "0"),
        Err(error) => assert!(error.to_string().len() < text.len() + 256),
    }
}

/// Reads `bytes` as rules that give weights types, and asks them for some names.
pub fn rules(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    match text.parse::<TensorTypes>() {
        Ok(rules) => {
            assert!(!rules.is_empty() && text.contains('='));
            for name in [
                "",
                "transformer.transformer_blocks.12.attn.to_q.weight",
                text,
            ] {
                let _ = rules.of(name);
            }
        }
        Err(error) => assert!(error.to_string().len() < 2 * text.len() + 512, "{error}"),
    }
}
