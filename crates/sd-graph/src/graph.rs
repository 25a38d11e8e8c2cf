//! Recording a computation: what a forward pass writes into.
//!
//! A graph is recorded by plain Rust, checked as it is recorded, and handed to ggml only when all of it is right. So
//! no assertion of ggml can be reached: a wrong shape is kept as the graph's first error and comes out once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

use sd_backend::DType;

use crate::op::Op;
use crate::param::Param;
use crate::runner_cache::{CacheEntry, storable};
use crate::shape::{self, Reason, Shape};
use crate::state::State;

/// A number type that inputs, constants and outputs can hold.
pub trait Element: bytemuck::Pod + sealed::Sealed {
    /// The tensor type with this element.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
    impl Sealed for half::f16 {}
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for i32 {
    const DTYPE: DType = DType::I32;
}
impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}

/// The first mistake in a graph: which operation, on which shapes, where in the source, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operation} of {operands} at {location}: {reason}")]
pub struct GraphError {
    /// Name of the operation.
    pub operation: &'static str,
    /// The operands' shapes, with the names of weights and inputs among them.
    pub operands: String,
    /// Source line that asked for it.
    pub location: String,
    /// Why it has no result.
    pub reason: String,
}

/// Number of a tensor within its graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TensorId(u32);

impl TensorId {
    pub(crate) fn new(index: usize) -> TensorId {
        TensorId(index as u32)
    }

    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// One recorded tensor.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub op: Op,
    pub sources: Vec<TensorId>,
    pub shape: Shape,
    pub dtype: DType,
}

impl Node {
    /// Bytes of its elements, one behind the other.
    pub(crate) fn bytes(&self) -> usize {
        let inner = self.shape.inner();
        let row = self.dtype.row_bytes(inner).unwrap_or(0);
        row.saturating_mul(self.shape.elements() / inner.max(1))
    }
}

/// A value that a plan is given before each run.
#[derive(Debug, Clone)]
pub(crate) struct Named {
    pub name: String,
    pub tensor: TensorId,
}

/// A place where a graph may be cut: a tensor that is kept for what comes after, and the group it belongs to.
#[derive(Debug, Clone)]
pub(crate) struct Cut {
    pub group: String,
    pub tensor: TensorId,
}

/// A value that a run puts into its cache.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    pub entry: CacheEntry,
    pub value: TensorId,
}

/// Everything that was recorded.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    pub nodes: Vec<Node>,
    pub params: Vec<Param>,
    pub constants: Vec<Vec<u8>>,
    pub inputs: Vec<Named>,
    pub outputs: Vec<Named>,
    /// States that the graph reads or writes, and values that go into them at the end of a run.
    pub states: Vec<State>,
    pub kept: Vec<(TensorId, TensorId)>,
    /// Entries of the cache that are read, by number, and those that are stored. No name twice in either.
    pub cached: Vec<CacheEntry>,
    pub stores: Vec<Store>,
    /// At most one for each tensor.
    pub cuts: Vec<Cut>,
    pub error: Option<GraphError>,
    /// Row numbers that an input may hold are below this; ggml aborts on others.
    pub index_limits: HashMap<TensorId, usize>,
    param_nodes: HashMap<usize, TensorId>,
    cached_nodes: Vec<TensorId>,
}

impl Recording {
    /// Records what `build` writes.
    ///
    /// # Errors
    /// The first mistake in it.
    pub(crate) fn of(build: impl for<'g> FnOnce(Graph<'g>)) -> Result<Recording, GraphError> {
        let recording = RefCell::new(Recording::default());
        build(Graph {
            recording: &recording,
            brand: PhantomData,
        });
        let mut recording = recording.into_inner();
        match recording.error.take() {
            Some(error) => Err(error),
            None => Ok(recording),
        }
    }

    pub(crate) fn node(&self, id: TensorId) -> &Node {
        &self.nodes[id.index()]
    }

    /// Whether it reads or stores something in a cache.
    pub(crate) fn uses_cache(&self) -> bool {
        !self.cached.is_empty() || !self.stores.is_empty()
    }

    fn push(&mut self, node: Node) -> TensorId {
        let id = TensorId(self.nodes.len() as u32);
        self.nodes.push(node);
        id
    }

    fn describe(&self, id: TensorId) -> String {
        let node = self.node(id);
        match &node.op {
            Op::Param(index) => format!("{} {}", self.params[*index].name(), node.shape),
            Op::Input => match self.inputs.iter().find(|input| input.tensor == id) {
                Some(input) => format!("{} {}", input.name, node.shape),
                None => node.shape.to_string(),
            },
            _ => node.shape.to_string(),
        }
    }

    fn fail(
        &mut self,
        operation: &'static str,
        sources: &[TensorId],
        reason: Reason,
        location: &Location<'_>,
    ) {
        if self.error.is_some() {
            return;
        }
        let operands: Vec<String> = sources.iter().map(|&id| self.describe(id)).collect();
        self.error = Some(GraphError {
            operation,
            operands: if operands.is_empty() {
                "nothing".to_owned()
            } else {
                operands.join(" and ")
            },
            location: format!("{}:{}", location.file(), location.line()),
            reason: reason.into_owned(),
        });
    }
}

/// A graph being recorded. A cheap handle, branded with `'g` so that tensors of two graphs cannot be mixed:
///
/// ```compile_fail
/// use sd_graph::{Estimate, Graph};
/// Estimate::of(|first| {
///     let a = first.input::<f32>("a", [2]);
///     Estimate::of(|second| {
///         let b = second.input::<f32>("b", [2]);
///         second.output("sum", a + b);
///     });
/// });
/// ```
#[derive(Clone, Copy)]
pub struct Graph<'g> {
    recording: &'g RefCell<Recording>,
    // Invariant in 'g: no lifetime may be shortened or stretched into another graph's.
    brand: PhantomData<fn(&'g ()) -> &'g ()>,
}

/// A tensor of a graph: a cheap handle to a value that does not exist yet.
#[derive(Clone, Copy)]
pub struct Tensor<'g> {
    graph: Graph<'g>,
    id: TensorId,
}

impl<'g> Graph<'g> {
    /// A value that must be set before each run.
    #[track_caller]
    pub fn input<T: Element>(self, name: &str, shape: impl AsRef<[usize]>) -> Tensor<'g> {
        let location = Location::caller();
        let mut recording = self.recording.borrow_mut();
        let shape = Shape::new(shape.as_ref()).unwrap_or_else(|reason| {
            recording.fail("input", &[], format!("`{name}`: {reason}").into(), location);
            Shape::ONE
        });
        if recording.inputs.iter().any(|input| input.name == name) {
            recording.fail(
                "input",
                &[],
                format!("two inputs are called `{name}`").into(),
                location,
            );
        }
        let tensor = recording.push(Node {
            op: Op::Input,
            sources: Vec::new(),
            shape,
            dtype: T::DTYPE,
        });
        recording.inputs.push(Named {
            name: name.to_owned(),
            tensor,
        });
        drop(recording);
        Tensor {
            graph: self,
            id: tensor,
        }
    }

    /// A value that is known when the graph is built and kept with the plan.
    #[track_caller]
    pub fn constant<T: Element>(self, values: &[T], shape: impl AsRef<[usize]>) -> Tensor<'g> {
        let location = Location::caller();
        let mut recording = self.recording.borrow_mut();
        let shape = Shape::new(shape.as_ref())
            .and_then(|shape| {
                if shape.elements() == values.len() {
                    Ok(shape)
                } else {
                    Err(format!("{} values do not fill {shape}", values.len()).into())
                }
            })
            .unwrap_or_else(|reason| {
                recording.fail("constant", &[], reason, location);
                Shape::ONE
            });
        let index = recording.constants.len();
        recording
            .constants
            .push(bytemuck::cast_slice(values).to_vec());
        let id = recording.push(Node {
            op: Op::Constant(index),
            sources: Vec::new(),
            shape,
            dtype: T::DTYPE,
        });
        drop(recording);
        Tensor { graph: self, id }
    }

    /// A parameter of a model. Asking twice gives the same tensor.
    pub fn param(self, param: &Param) -> Tensor<'g> {
        let mut recording = self.recording.borrow_mut();
        let id = match recording.param_nodes.get(&param.key()) {
            Some(&id) => id,
            None => {
                let index = recording.params.len();
                recording.params.push(param.clone());
                let node = Node {
                    op: Op::Param(index),
                    sources: Vec::new(),
                    shape: param.shape(),
                    dtype: param.dtype(),
                };
                let id = recording.push(node);
                recording.param_nodes.insert(param.key(), id);
                id
            }
        };
        drop(recording);
        Tensor { graph: self, id }
    }

    /// What a state holds when a run begins, in its type.
    pub fn state(self, state: &State) -> Tensor<'g> {
        let mut recording = self.recording.borrow_mut();
        if !recording.states.contains(state) {
            recording.states.push(state.clone());
        }
        drop(recording);
        self.param(state.param())
    }

    /// Puts `value` into a state when all else is computed: into all of it, or the first elements of its outermost dimension.
    /// Of two values for one state the later stays.
    #[track_caller]
    pub fn keep(self, state: &State, value: Tensor<'g>) {
        let location = Location::caller();
        let target = self.state(state);
        let rule = if value.dtype() == DType::F32 {
            shape::keep(state.shape(), value.shape())
        } else {
            Err(format!("a state is given f32, not {}", value.dtype()).into())
        };
        let mut recording = self.recording.borrow_mut();
        match rule {
            Ok(_) => recording.kept.push((target.id, value.id)),
            Err(reason) => recording.fail("keep", &[target.id, value.id], reason, location),
        }
    }

    /// What the cache that is [attached](crate::Plan::attach) for a run holds under `name`: F32, F16, BF16 or Q8_0. Asking
    /// twice gives the same tensor. To compute with another type than F32, [cast](Tensor::cast) it.
    #[track_caller]
    pub fn cached(self, name: &str, shape: impl AsRef<[usize]>, dtype: DType) -> Tensor<'g> {
        let location = Location::caller();
        let mut recording = self.recording.borrow_mut();
        let known = recording.cached.iter().position(|e| e.name == name);
        let rule = Shape::new(shape.as_ref())
            .and_then(|shape| storable(shape, dtype).map(|()| shape))
            .and_then(|shape| match known.map(|index| &recording.cached[index]) {
                Some(entry) if (entry.shape, entry.dtype) != (shape, dtype) => Err(format!(
                    "`{name}` is read as {} {} before",
                    entry.dtype, entry.shape
                )
                .into()),
                _ => Ok(shape),
            });
        if let (Ok(_), Some(index)) = (&rule, known) {
            let id = recording.cached_nodes[index];
            drop(recording);
            return Tensor { graph: self, id };
        }
        let shape = rule.unwrap_or_else(|reason| {
            recording.fail(
                "cached",
                &[],
                format!("`{name}`: {reason}").into(),
                location,
            );
            Shape::ONE
        });
        let op = Op::Cached(recording.cached.len());
        let id = recording.push(Node {
            op,
            sources: Vec::new(),
            shape,
            dtype,
        });
        recording.cached.push(CacheEntry {
            name: name.to_owned(),
            shape,
            dtype,
        });
        recording.cached_nodes.push(id);
        drop(recording);
        Tensor { graph: self, id }
    }

    /// Puts `value`, which is F32, into the cache that is [attached](crate::Plan::attach) for a run, under `name` and as
    /// `dtype` (F32, F16, BF16 or Q8_0). It is there when all of the run has succeeded; until then, and for this run,
    /// [`Graph::cached`] is what was there before.
    ///
    /// A graph that is cut stores it where it is computed, so that nothing is kept for it.
    #[track_caller]
    pub fn store(self, name: &str, value: Tensor<'g>, dtype: DType) {
        let location = Location::caller();
        let shape = value.shape();
        let mut recording = self.recording.borrow_mut();
        let rule = storable(shape, dtype)
            .and_then(|()| match recording.node(value.id).dtype {
                DType::F32 => Ok(()),
                other => Err(format!("f32 is stored, not {other}").into()),
            })
            .and_then(|()| {
                let mut stores = recording.stores.iter();
                match stores.any(|store| store.entry.name == name) {
                    true => Err("it is stored twice".into()),
                    false => Ok(()),
                }
            });
        match rule {
            Ok(()) => recording.stores.push(Store {
                entry: CacheEntry {
                    name: name.to_owned(),
                    shape,
                    dtype,
                },
                value: value.id,
            }),
            Err(reason) => {
                let reason = format!("`{name}`: {reason}").into();
                recording.fail("store", &[value.id], reason, location);
            }
        }
    }

    /// Names a tensor as a result, to be read after each run.
    #[track_caller]
    pub fn output(self, name: &str, tensor: Tensor<'g>) {
        let location = Location::caller();
        let mut recording = self.recording.borrow_mut();
        if recording.outputs.iter().any(|output| output.name == name) {
            recording.fail(
                "output",
                &[tensor.id],
                format!("two outputs are called `{name}`").into(),
                location,
            );
        }
        recording.outputs.push(Named {
            name: name.to_owned(),
            tensor: tensor.id,
        });
    }

    /// Records a mistake that a model found by itself, before any operation could. The tensor stands in for what was
    /// wanted, so that a forward pass needs no error handling; the mistake comes out when a plan is built.
    #[track_caller]
    pub fn mistake(self, operation: &'static str, reason: &str) -> Tensor<'g> {
        let rule = Err(reason.to_owned().into());
        self.record(
            operation,
            Op::Reshape,
            &[],
            DType::F32,
            rule,
            Location::caller(),
        )
    }

    /// Promises that all numbers in `index` are below `rows`: at once for a constant, before each run for an input.
    pub(crate) fn limit_index(self, index: Tensor<'g>, rows: usize) -> Result<(), Reason> {
        let mut recording = self.recording.borrow_mut();
        match recording.node(index.id).op {
            Op::Input => {
                let limit = recording.index_limits.entry(index.id).or_insert(rows);
                *limit = rows.min(*limit);
                Ok(())
            }
            Op::Constant(number) => check_index(&recording.constants[number], rows),
            _ => Err(
                "row numbers must be an input or a constant, so that they can be checked".into(),
            ),
        }
    }

    /// Records one operation whose shape rule has been asked. After a mistake the graph goes on with a stand-in of the
    /// first operand's shape, so that a forward pass needs no error handling; nothing of it is ever run.
    pub(crate) fn record(
        self,
        operation: &'static str,
        op: Op,
        sources: &[Tensor<'g>],
        dtype: DType,
        shape: Result<Shape, Reason>,
        location: &Location<'_>,
    ) -> Tensor<'g> {
        let ids: Vec<TensorId> = sources.iter().map(|source| source.id).collect();
        let mut recording = self.recording.borrow_mut();
        let shape = shape.unwrap_or_else(|reason| {
            recording.fail(operation, &ids, reason, location);
            ids.first()
                .map_or(Shape::ONE, |&id| recording.node(id).shape)
        });
        let id = recording.push(Node {
            op,
            sources: ids,
            shape,
            dtype,
        });
        drop(recording);
        Tensor { graph: self, id }
    }
}

impl<'g> Tensor<'g> {
    /// Marks a place where the graph may be cut, so that it runs in pieces where memory does not suffice for the whole:
    /// everything that `group` names is computed in one piece, and this tensor is what later pieces need of it. Groups
    /// run in the order in which they were first marked. The result is the same however a graph is cut.
    ///
    /// A tensor belongs to one group; the last mark counts.
    pub fn cut(self, group: &str) -> Tensor<'g> {
        let mut recording = self.graph.recording.borrow_mut();
        recording.cuts.retain(|cut| cut.tensor != self.id);
        recording.cuts.push(Cut {
            group: group.to_owned(),
            tensor: self.id,
        });
        drop(recording);
        self
    }

    /// The shape, outermost first.
    pub fn shape(self) -> Shape {
        self.graph.recording.borrow().node(self.id).shape
    }

    /// Size of dimension `axis`; 1 if there is none, which some operation will then report.
    pub fn dim(self, axis: usize) -> usize {
        self.shape().dims().get(axis).copied().unwrap_or(1)
    }

    /// The element type.
    pub fn dtype(self) -> DType {
        self.graph.recording.borrow().node(self.id).dtype
    }

    /// The graph this belongs to.
    pub fn graph(self) -> Graph<'g> {
        self.graph
    }
}

/// Refuses row numbers below 0 or from `rows` up, given as the bytes of 32-bit integers.
pub(crate) fn check_index(bytes: &[u8], rows: usize) -> Result<(), Reason> {
    let wrong = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|&bytes| i32::from_ne_bytes(bytes))
        .find(|&row| usize::try_from(row).map_or(true, |row| row >= rows));
    match wrong {
        Some(row) => Err(format!("row {row} is not one of {rows}").into()),
        None => Ok(()),
    }
}

impl fmt::Debug for Graph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({} tensors)", self.recording.borrow().nodes.len())
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {})", self.dtype(), self.shape())
    }
}
