//! Texts that people write on a command line.

use sd_backend::MemoryBudgets;

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
