//! Names of tensors as different programs give them, as tables: from the names in a file to those of the model.
//!
//! Models declare their parameters under one set of names, those of the reference. A file that calls them otherwise, or keeps
//! several as one, becomes a [`Selection`] with the right names before anything is declared against it.

use std::collections::BTreeSet;

use sd_graph::{Checkpoint, Rows, Selection};

use crate::error::Result;

/// How one program names the tensors of a part of a model.
#[derive(Debug)]
pub(crate) struct Naming {
    /// What users know it as.
    pub(crate) title: &'static str,
    /// What names may begin with; a part `+` of it stands for any one.
    pub(crate) prefixes: &'static [&'static str],
    /// Tensors that are there, behind the prefix, in every file of this naming and in no other's.
    pub(crate) marks: &'static [&'static str],
    /// From the file's names to the model's. Where several have the same pattern each makes a tensor. Names that fit none
    /// stay what they are.
    pub(crate) rules: &'static [Rule],
}

/// One line of a table of names. In a pattern `#` stands for a number, and `*` at the end for whatever follows.
#[derive(Debug)]
pub(crate) struct Rule {
    /// Pattern of names in the file.
    pub(crate) from: &'static str,
    /// The name in the model.
    pub(crate) to: &'static str,
    /// What of the stored tensor it is.
    pub(crate) rows: Rows,
}

/// A rule for a whole tensor.
pub(crate) const fn whole(from: &'static str, to: &'static str) -> Rule {
    let rows = Rows::ALL;
    Rule { from, to, rows }
}

/// A rule for one of `of` equal parts of a tensor's rows.
pub(crate) const fn part(from: &'static str, to: &'static str, part: usize, of: usize) -> Rule {
    let rows = Rows { part, of };
    Rule { from, to, rows }
}

impl Naming {
    /// What the names of this naming begin with in a file, for each set of them that is there.
    pub(crate) fn prefixes_in(&self, checkpoint: &Checkpoint) -> BTreeSet<String> {
        let Some((first, others)) = self.marks.split_first() else {
            return BTreeSet::new();
        };
        let has = |name: String| checkpoint.get(&name).is_some();
        checkpoint
            .tensors()
            .filter_map(|(name, _)| name.strip_suffix(first))
            .filter(|prefix| self.prefixes.iter().any(|known| is_prefix(known, prefix)))
            .filter(|prefix| others.iter().all(|mark| has(format!("{prefix}{mark}"))))
            .map(str::to_owned)
            .collect()
    }

    /// The model's names of what a file calls `name`, behind the prefix, and which rows each is.
    pub(crate) fn in_model(&self, name: &str) -> Vec<(String, Rows)> {
        let mut rules = self.rules.iter();
        let Some(found) = rules.find(|rule| captured(rule.from, name).is_some()) else {
            return vec![(name.to_owned(), Rows::ALL)];
        };
        let same = self.rules.iter().filter(|rule| rule.from == found.from);
        same.filter_map(|rule| Some((filled(rule.to, &captured(rule.from, name)?), rule.rows)))
            .collect()
    }

    /// The names, behind the prefix, under which files of this naming may have what the model calls `name`.
    pub(crate) fn in_file<'n>(&'n self, name: &'n str) -> impl Iterator<Item = String> + 'n {
        let rules = self.rules.iter();
        rules.filter_map(move |rule| Some(filled(rule.from, &captured(rule.to, name)?)))
    }

    /// The tensors behind `prefix` under the model's names.
    ///
    /// # Errors
    /// Two tensors with one name, or rows that are no equal parts.
    pub(crate) fn select(&self, checkpoint: &Checkpoint, prefix: &str) -> Result<Checkpoint> {
        let mut selection = Selection::new(checkpoint);
        for (stored, _) in checkpoint.tensors() {
            let Some(name) = stored.strip_prefix(prefix) else {
                continue;
            };
            for (name, rows) in self.in_model(name) {
                selection.add(name, checkpoint, stored, rows)?;
            }
        }
        Ok(selection.finish()?)
    }
}

/// Whether `prefix` is what `pattern` describes.
fn is_prefix(pattern: &str, prefix: &str) -> bool {
    let (mut known, mut found) = (pattern.split('.'), prefix.split('.'));
    loop {
        match (known.next(), found.next()) {
            (None, None) => return true,
            (Some("+"), Some(part)) if !part.is_empty() => {}
            (Some(known), Some(found)) if known == found => {}
            _ => return false,
        }
    }
}

/// What the places of `pattern` stand for in `name`, if it fits.
fn captured<'n>(pattern: &str, name: &'n str) -> Option<Vec<&'n str>> {
    let mut places = Vec::new();
    let mut rest = Some(name);
    for piece in pattern.split('.') {
        let left = rest?;
        if piece == "*" {
            places.push(left);
            return Some(places);
        }
        let (part, behind) = match left.split_once('.') {
            Some((part, behind)) => (part, Some(behind)),
            None => (left, None),
        };
        match piece {
            "#" if !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()) => {
                places.push(part)
            }
            _ if piece == part => {}
            _ => return None,
        }
        rest = behind;
    }
    rest.is_none().then_some(places)
}

/// `pattern` with its places filled in order.
fn filled(pattern: &str, places: &[&str]) -> String {
    let mut places = places.iter();
    let pieces = pattern.split('.').map(|piece| match piece {
        "#" | "*" => places.next().copied().unwrap_or_default(),
        piece => piece,
    });
    pieces.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_take_numbers_and_the_rest() {
        assert_eq!(
            captured("blk.#.attn_q.*", "blk.12.attn_q.weight"),
            Some(vec!["12", "weight"])
        );
        assert_eq!(captured("blk.#.attn_q.*", "blk.x.attn_q.weight"), None);
        assert_eq!(captured("blk.#.attn_q.*", "blk.12.attn_q"), None);
        assert_eq!(captured("norm.weight", "norm.weight.scale"), None);
        assert_eq!(captured("norm.weight", "norm"), None);
        assert_eq!(
            filled("layers.#.q.*", &["3", "weight"]),
            "layers.3.q.weight"
        );
        assert!(is_prefix("", "") && is_prefix("model.", "model."));
        assert!(
            is_prefix("text_encoders.+.", "text_encoders.qwen.")
                && !is_prefix("text_encoders.+.", "text_encoders.a.b.")
        );
        assert!(!is_prefix("", "a."));
    }
}
