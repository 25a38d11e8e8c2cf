//! The command as its users run it.

mod generate;
mod info;
mod run;
