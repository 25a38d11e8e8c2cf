//! The JSON text at the beginning of a safetensors file, as it stands there: nothing in it is believed yet.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use safetensors::tensor::Dtype;
use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::StoredType;
use super::error::{CheckpointError, shown};
use super::string_map::{StringMap, Trail};
use super::tensor_info::MAX_RANK;

const METADATA: &str = "__metadata__";

/// What a header says.
#[derive(Debug, Default)]
pub(super) struct Header {
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) entries: BTreeMap<String, Entry>,
}

/// What a header says about one tensor.
///
/// Fields and their meaning are those of `safetensors::tensor::TensorInfo`, except that a list of a million
/// dimensions is not read to its end, that offsets have 64 bits on every machine, and that an unknown type is kept to
/// be named.
#[derive(Debug, Deserialize)]
pub(super) struct Entry {
    pub(super) dtype: TypeName,
    pub(super) shape: Shape,
    /// First byte and the one after the last, counted from the end of the header.
    pub(super) data_offsets: (u64, u64),
}

impl Header {
    /// Reads the header `text` of `file`. Every name in it is different; the entries are unchecked otherwise.
    pub(super) fn read(file: &Path, text: &[u8]) -> Result<Header, CheckpointError> {
        let text = str::from_utf8(text).map_err(|error| {
            CheckpointError::header(file, format!("its header is not UTF-8 text: {error}"))
        })?;
        let mut header = Header::default();
        let mut reader = Reader {
            header: &mut header,
            tensor: Trail::default(),
            metadata: Trail::default(),
        };
        let mut json = serde_json::Deserializer::from_str(text);
        match (&mut reader)
            .deserialize(&mut json)
            .and_then(|()| json.end())
        {
            Ok(()) => Ok(header),
            Err(error) => Err(reader.explain(file, &error)),
        }
    }
}

struct Reader<'a> {
    header: &'a mut Header,
    tensor: Trail,
    metadata: Trail,
}

impl Reader<'_> {
    fn explain(&self, file: &Path, error: &serde_json::Error) -> CheckpointError {
        let text = shown(&error.to_string());
        match (&self.tensor.at, &self.metadata.at) {
            (_, Some(name)) if self.metadata.repeated => {
                CheckpointError::header(file, format!("`{METADATA}` names `{}` twice", shown(name)))
            }
            (Some(name), _) if name == METADATA && self.tensor.repeated => {
                CheckpointError::header(file, format!("its header has `{METADATA}` twice"))
            }
            (Some(name), _) if name == METADATA && error.is_data() => CheckpointError::header(
                file,
                format!("its `{METADATA}` is not a map from texts to texts: {text}"),
            ),
            (Some(name), _) if self.tensor.repeated => {
                CheckpointError::tensor(file, name, "the header names it twice")
            }
            (Some(name), _) if name != METADATA => CheckpointError::tensor(
                file,
                name,
                format!("its entry cannot be understood: {text}"),
            ),
            _ if !error.is_data() => {
                CheckpointError::header(file, format!("its header is not valid JSON: {text}"))
            }
            _ => CheckpointError::header(file, format!("its header is not a JSON object: {text}")),
        }
    }
}

impl<'de> DeserializeSeed<'de> for &mut Reader<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Reader<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to their types, shapes and offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut metadata = None;
        while let Some(name) = map.next_key::<String>()? {
            if self.header.entries.contains_key(&name) || (name == METADATA && metadata.is_some()) {
                return Err(self.tensor.repeated(name));
            }
            self.tensor.at = Some(name.clone());
            if name == METADATA {
                metadata = Some(map.next_value_seed(Metadata(&mut self.metadata))?);
            } else {
                let entry = map.next_value::<Entry>()?;
                self.header.entries.insert(name, entry);
            }
            self.tensor.at = None;
        }
        self.header.metadata = metadata.unwrap_or_default();
        Ok(())
    }
}

/// `__metadata__`: a map of texts, or nothing (`null`), which the format's own library writes and accepts.
struct Metadata<'a>(&'a mut Trail);

impl<'de> DeserializeSeed<'de> for Metadata<'_> {
    type Value = BTreeMap<String, String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for Metadata<'_> {
    type Value = BTreeMap<String, String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from names to texts")
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        StringMap(self.0).deserialize(deserializer)
    }
}

/// An element type, or the text that names none, made fit for a message.
#[derive(Debug)]
pub(super) enum TypeName {
    Known(StoredType),
    Unknown(String),
}

impl<'de> Deserialize<'de> for TypeName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TypeName, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = TypeName;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of an element type")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<TypeName, E> {
                // The format's own library says which names there are.
                let dtype =
                    Dtype::deserialize(StrDeserializer::<serde::de::value::Error>::new(name)).ok();
                let known = dtype
                    .and_then(StoredType::from_safetensors)
                    .map(TypeName::Known);
                Ok(known.unwrap_or_else(|| TypeName::Unknown(shown(name))))
            }
        }
        deserializer.deserialize_str(Name)
    }
}

/// Sides of a tensor, outermost first; at most [`MAX_RANK`] of them.
#[derive(Debug)]
pub(super) struct Shape(pub(super) Vec<usize>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Shape, D::Error> {
        struct Sides;
        impl<'de> Visitor<'de> for Sides {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a shape: a list of whole numbers")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Shape, A::Error> {
                let mut sides = Vec::new();
                while let Some(side) = list.next_element()? {
                    if sides.len() == MAX_RANK {
                        return Err(A::Error::custom(format_args!(
                            "more than {MAX_RANK} dimensions"
                        )));
                    }
                    sides.push(side);
                }
                Ok(Shape(sides))
            }
        }
        deserializer.deserialize_seq(Sides)
    }
}
