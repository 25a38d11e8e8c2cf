//! JSON objects from names to texts, read without letting a repeated name pass.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, Visitor};

/// Where reading an object stopped: serde's errors know lines and columns, not names.
#[derive(Debug, Default)]
pub(super) struct Trail {
    /// The name whose value was being read.
    pub(super) at: Option<String>,
    /// Whether that name had been there before.
    pub(super) repeated: bool,
}

impl Trail {
    pub(super) fn repeated<E: serde::de::Error>(&mut self, name: String) -> E {
        (self.at, self.repeated) = (Some(name), true);
        E::custom("a name is there twice")
    }
}

/// Reads an object whose values are all texts.
pub(super) struct StringMap<'a>(pub(super) &'a mut Trail);

impl<'de> DeserializeSeed<'de> for StringMap<'_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for StringMap<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from names to texts")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut texts = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            if texts.contains_key(&name) {
                return Err(self.0.repeated(name));
            }
            self.0.at = Some(name.clone());
            let text = map.next_value::<String>()?;
            self.0.at = None;
            texts.insert(name, text);
        }
        Ok(texts)
    }
}
