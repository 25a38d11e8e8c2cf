//! Deciding how parameters get into a device's memory, before anything is taken or read. One of the
//! places of this crate with `unsafe` in it.

use std::collections::BTreeMap;
use std::ops::Range;

use sd_backend::{Buffer, DType, Device, DeviceKind, Mapping};

use crate::checkpoint::{Checkpoint, StoredType};
use crate::error::{Error, Result};
use crate::param::Param;
use crate::raw::{Arena, bytes_on};

/// Elements that one thread brings into memory at once: whole blocks and whole bytes of every type.
pub(crate) const PIECE: usize = 1 << 20;

/// Threads that bring pieces into memory at once; each has staging memory of its own.
const MOST_LANES: usize = 8;

/// How parameters are brought into the memory of one device: which of them lie in a mapped file, which are copied and
/// which converted. Made without taking memory or reading a weight.
#[derive(Debug)]
pub struct LoadPlan<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) params: &'a [Param],
    pub(crate) device: Device,
    /// One for each parameter.
    pub(crate) steps: Vec<Step>,
    cost: LoadCost,
}

/// Bytes of memory that a [`LoadPlan`] takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadCost {
    /// Pages of mapped files, on the device. A file that another load of the same checkpoint has mapped already is
    /// counted here again, but taken once.
    pub mapped: u64,
    /// Buffers on the device.
    pub allocated: u64,
    /// Host memory that is taken while loading only.
    pub staging: u64,
}

impl LoadCost {
    /// Bytes that stay on the device.
    pub fn resident(&self) -> u64 {
        self.mapped + self.allocated
    }
}

/// How one parameter gets into memory.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    /// Where it lies in a file, if it may be used there.
    pub(crate) in_file: Option<(usize, Range<u64>)>,
    pub(crate) stored: StoredType,
    pub(crate) elements: u64,
    /// Bytes that the device wants for it in a buffer.
    pub(crate) buffer_bytes: usize,
}

/// Memory of the host that pieces pass through.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Staging {
    pieces: u64,
    /// Threads that bring pieces.
    pub(crate) lanes: usize,
    /// For each lane: bytes as stored, of what is converted.
    pub(crate) stored: usize,
    /// For each lane: bytes of what is sent to a device.
    pub(crate) sent: usize,
}

impl Staging {
    /// What parameters that are copied to `device` pass through.
    pub(crate) fn of<'s>(
        copied: impl Iterator<Item = (&'s Param, &'s Step)>,
        device: Device,
    ) -> Staging {
        let is_sent = !Buffer::is_host(device);
        let mut staging = Staging::default();
        let mut pieces = 0;
        for (param, step) in copied {
            pieces += step.elements.div_ceil(PIECE as u64);
            let elements = step.elements.min(PIECE as u64);
            if !step.is_kept(param.dtype()) {
                let stored = step.stored.bytes(elements).unwrap_or(0) as usize;
                staging.stored = staging.stored.max(stored);
            }
            if is_sent {
                let sent = param.dtype().row_bytes(elements as usize).unwrap_or(0);
                staging.sent = staging.sent.max(sent);
            }
        }
        staging.add_pieces(pieces, 0);
        staging
    }

    /// Adds so many pieces of up to so many bytes that are sent to a device.
    pub(crate) fn add_pieces(&mut self, pieces: u64, bytes: usize) {
        self.pieces += pieces;
        self.sent = self.sent.max(bytes);
        self.lanes = lanes(self.pieces);
    }

    pub(crate) fn bytes(self) -> u64 {
        (self.lanes * (self.stored + self.sent)) as u64
    }
}

impl Step {
    /// Whether the bytes in memory are those of the file.
    pub(crate) fn is_kept(&self, dtype: DType) -> bool {
        self.stored.in_memory() == Some(dtype)
    }
}

impl<'a> LoadPlan<'a> {
    /// Plans to load `params`, which were declared against `checkpoint`, for `device`.
    ///
    /// With [`Mapping::Auto`] a file is mapped if the device says that it uses host memory in place, the file is on a
    /// local disk, and at least half of it would be used where it lies: mapped files are counted as a whole.
    ///
    /// # Errors
    /// [`Error::NotDeclared`] for a parameter of another checkpoint, and memory for descriptions that runs out.
    pub fn new(
        checkpoint: &'a Checkpoint,
        params: &'a [Param],
        device: Device,
        mapping: Mapping,
    ) -> Result<LoadPlan<'a>> {
        let mut steps = Vec::with_capacity(params.len());
        for param in params {
            steps.push(step(checkpoint, param, device)?);
        }
        choose_files(checkpoint, device, mapping, &mut steps);

        let mut cost = LoadCost::default();
        let mut files: Vec<usize> = Vec::new();
        let alignment = Buffer::alignment(device);
        for step in &steps {
            match step.in_file {
                Some((file, _)) => files.push(file),
                None => {
                    cost.allocated += step.buffer_bytes.next_multiple_of(alignment) as u64;
                }
            }
        }
        files.sort_unstable();
        files.dedup();
        cost.mapped = files
            .into_iter()
            .map(|file| sd_backend::pages(checkpoint.file_length(file)))
            .sum();
        let copied = params.iter().zip(&steps);
        let copied = copied.filter(|(_, step)| step.in_file.is_none());
        cost.staging = Staging::of(copied, device).bytes();
        Ok(LoadPlan {
            checkpoint,
            params,
            device,
            steps,
            cost,
        })
    }

    /// What it takes.
    pub fn cost(&self) -> LoadCost {
        self.cost
    }
}

pub(crate) fn step(checkpoint: &Checkpoint, param: &Param, device: Device) -> Result<Step> {
    let not_declared = || Error::NotDeclared {
        name: param.name().to_owned(),
    };
    let info = checkpoint.get(param.name()).ok_or_else(not_declared)?;
    if info.elements() != param.shape().elements() as u64 {
        return Err(not_declared());
    }
    let no_room = |_| Error::from(sd_backend::Ledger::default().refused(device, 0));
    let arena = Arena::new(1, false).map_err(no_room)?;
    let tensor = arena
        .tensor(param.dtype(), param.shape())
        .map_err(no_room)?;
    // SAFETY: the arena is alive to the end of this function.
    let buffer_bytes = unsafe { bytes_on(tensor, device) };
    let mut step = Step {
        in_file: None,
        stored: info.stored,
        elements: info.elements(),
        buffer_bytes,
    };
    // Numbers in files are little-endian. A device that wants more bytes than the values have would read the next tensor.
    let same = step.is_kept(param.dtype())
        && buffer_bytes == param.bytes()
        && cfg!(target_endian = "little");
    if same {
        let alignment = alignment_in_file(param.dtype(), device) as u64;
        step.in_file = checkpoint.range_of(param.name()).filter(|(_, range)| {
            range.start.is_multiple_of(alignment) && range.end - range.start == buffer_bytes as u64
        });
    }
    Ok(step)
}

/// Alignment in bytes that a tensor needs to be used in a file. Safetensors files only promise that of the elements.
///
/// The processor's kernels load vectors of weights by instructions that take any address; their buffers are aligned for
/// speed alone. Other devices say what they need and are believed.
fn alignment_in_file(dtype: DType, device: Device) -> usize {
    match (device.kind(), dtype.block_len()) {
        (DeviceKind::Cpu, 1) => dtype.block_bytes(),
        // No member of a block has more than 4 bytes.
        (DeviceKind::Cpu, _) => size_of::<u32>(),
        _ => Buffer::alignment(device),
    }
}

/// Takes the files that are not to be mapped out of `steps`.
fn choose_files(checkpoint: &Checkpoint, device: Device, mapping: Mapping, steps: &mut [Step]) {
    let possible = match mapping {
        Mapping::Auto => device.has_host_pointers() && device.capabilities().buffer_from_host_ptr,
        Mapping::Always => device.has_host_pointers(),
        _ => false,
    };
    let mut used: BTreeMap<usize, u64> = BTreeMap::new();
    for (file, range) in steps.iter().filter_map(|step| step.in_file.as_ref()) {
        *used.entry(*file).or_default() += range.end - range.start;
    }
    used.retain(|&file, bytes| {
        let length = sd_backend::pages(checkpoint.file_length(file));
        possible
            && (mapping == Mapping::Always
                || (checkpoint.is_local(file) && *bytes >= length.div_ceil(2)))
    });
    for step in steps {
        if let Some((file, _)) = &step.in_file
            && !used.contains_key(file)
        {
            step.in_file = None;
        }
    }
}

/// Threads for so many pieces.
fn lanes(pieces: u64) -> usize {
    let threads = rayon::current_num_threads().min(MOST_LANES);
    threads.min(usize::try_from(pieces).unwrap_or(usize::MAX))
}
