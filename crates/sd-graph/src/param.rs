//! Parameters: named weights of a model, declared first and loaded later.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use sd_backend::{Buffer, DType};

use crate::checkpoint::Checkpoint;
use crate::shape::Shape;

/// A parameter of a model: a name, a shape, a type and, once loaded, a place in memory. A cheap shared handle.
///
/// Made by [`Scope::param`](crate::Scope::param).
#[derive(Clone)]
pub struct Param(Arc<Inner>);

struct Inner {
    name: String,
    shape: Shape,
    dtype: DType,
    place: RwLock<Option<Place>>,
    home: RwLock<Option<Home>>,
}

/// Where a parameter's values can be had from while they are not in the memory of the device that computes.
#[derive(Debug, Clone)]
pub(crate) enum Home {
    /// In the host's memory, as the device wants them.
    Host(Place),
    /// In their file.
    File(Checkpoint),
}

/// Where a loaded parameter lies.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub buffer: Arc<Buffer>,
    pub offset: usize,
}

impl Param {
    pub(crate) fn new(name: String, shape: Shape, dtype: DType) -> Param {
        Param(Arc::new(Inner {
            name,
            shape,
            dtype,
            place: RwLock::default(),
            home: RwLock::default(),
        }))
    }

    /// The same parameter with a place of its own, for another device.
    pub(crate) fn double(&self) -> Param {
        Param::new(self.0.name.clone(), self.0.shape, self.0.dtype)
    }

    /// The name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The shape, outermost first.
    pub fn shape(&self) -> Shape {
        self.0.shape
    }

    /// The element type in memory, which a load may have converted to.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// Bytes it takes in memory.
    pub fn bytes(&self) -> usize {
        let inner = self.0.shape.inner();
        self.0
            .dtype
            .row_bytes(inner)
            .map_or(0, |row| row * (self.0.shape.elements() / inner))
    }

    /// Whether its values are in memory.
    pub fn is_loaded(&self) -> bool {
        self.place().is_some()
    }

    /// Where it lies; whoever keeps the result keeps the memory.
    pub(crate) fn place(&self) -> Option<Place> {
        self.0
            .place
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Says where it lies, or that it no longer is in memory.
    pub(crate) fn set_place(&self, place: Option<Place>) {
        *self.0.place.write().unwrap_or_else(PoisonError::into_inner) = place;
    }

    /// Where its values can be had from when they are not in memory.
    pub(crate) fn home(&self) -> Option<Home> {
        self.0
            .home
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Says where its values can be had from.
    pub(crate) fn set_home(&self, home: Option<Home>) {
        *self.0.home.write().unwrap_or_else(PoisonError::into_inner) = home;
    }

    /// Tells one parameter from another, whatever their names.
    pub(crate) fn key(&self) -> usize {
        Arc::as_ptr(&self.0) as usize
    }
}

impl fmt::Debug for Param {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Param({} {} {})",
            self.0.name, self.0.dtype, self.0.shape
        )
    }
}
