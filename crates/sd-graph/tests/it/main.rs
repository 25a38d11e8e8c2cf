//! Integration tests of `sd-graph`.

mod checkpoint;
mod loading;
mod ops;
mod plans;
mod reference;
