//! The parameters of one part of a model, which may come and go. One of the places of this crate with `unsafe` in it.

use std::fmt;

use sd_backend::{Backend, BackendOptions, Device, Mapping, Residence};
use sd_ggml_sys as sys;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::load::{LoadReport, allocate, bind, unload};
use crate::load_plan::{LoadCost, LoadPlan};
use crate::param::{Param, Place};
use crate::raw::{Arena, bytes_on};
use crate::run::{Cancel, Progress, Reporter};

/// The parameters that a part of a model declared against a checkpoint, and where they live while it does not run.
pub struct Weights {
    checkpoint: Checkpoint,
    params: Vec<Param>,
    residence: Residence,
    mapping: Mapping,
    /// With [`Residence::Host`]: where each lies in the host's memory.
    on_host: Vec<Place>,
    /// Bytes of the device's memory that they take now.
    on_device: u64,
}

impl Weights {
    /// Parameters that were declared against `checkpoint`. They live on the device unless
    /// [`live`](Weights::live) says otherwise.
    pub fn new(checkpoint: Checkpoint, params: Vec<Param>) -> Weights {
        Weights {
            checkpoint,
            params,
            residence: Residence::Device,
            mapping: Mapping::Auto,
            on_host: Vec::new(),
            on_device: 0,
        }
    }

    /// Says where the parameters live, and whether their files may be mapped. Takes them out of memory if they were
    /// loaded.
    pub fn live(&mut self, residence: Residence, mapping: Mapping) {
        self.unload();
        self.on_host.clear();
        self.checkpoint.release_mappings();
        self.residence = residence;
        self.mapping = mapping;
    }

    /// The parameters.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Where they live.
    pub fn residence(&self) -> Residence {
        self.residence
    }

    /// Bytes of the device's memory that they take now.
    pub fn device_bytes(&self) -> u64 {
        self.on_device
    }

    /// Bytes of all parameters in memory.
    pub fn bytes(&self) -> u64 {
        self.params.iter().map(|param| param.bytes() as u64).sum()
    }

    /// What it takes to bring them into the memory of `device`. What lives on the host is copied.
    ///
    /// # Errors
    /// As for [`LoadPlan::new`].
    pub fn cost(&self, device: Device, residence: Residence, mapping: Mapping) -> Result<LoadCost> {
        let mapping = match residence {
            Residence::Host => Mapping::Never,
            _ => mapping,
        };
        Ok(LoadPlan::new(&self.checkpoint, &self.params, device, mapping)?.cost())
    }

    /// Brings them to where they live: into the memory of the device of `backend`, or of the host, or nowhere yet.
    ///
    /// # Errors
    /// As for [`LoadPlan::load`].
    pub fn load(
        &mut self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<LoadReport> {
        match self.residence {
            Residence::Device => self.load_from_files(backend, cancel, progress),
            Residence::Host => {
                let options = BackendOptions::default()
                    .threads(1)
                    .ledger(backend.ledger());
                let host = Backend::new(Device::cpu()?, &options)?;
                let plan =
                    LoadPlan::new(&self.checkpoint, &self.params, host.device(), self.mapping)?;
                let (places, report) = plan.fetch(&host, cancel, progress)?;
                self.on_host = places;
                Ok(report)
            }
            Residence::Disk => Ok(LoadReport::default()),
        }
    }

    /// Makes sure that they are in the memory of the device of `backend`, for a run.
    ///
    /// # Errors
    /// As for [`LoadPlan::load`].
    pub fn bring(
        &mut self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<()> {
        if self.params.iter().all(Param::is_loaded) {
            return Ok(());
        }
        match self.residence {
            Residence::Host if self.on_host.len() == self.params.len() => {
                self.copy_from_host(backend, cancel, progress)
            }
            _ => self.load_from_files(backend, cancel, progress).map(drop),
        }
    }

    /// Takes them out of the device's memory, unless they live there. Plans that use them must be dropped too for the
    /// memory to become free.
    pub fn release(&mut self) {
        if self.residence != Residence::Device {
            self.unload();
        }
    }

    /// Takes them out of the device's memory, wherever they live.
    pub fn unload(&mut self) {
        unload(&self.params);
        self.on_device = 0;
        if self.residence != Residence::Host {
            self.checkpoint.release_mappings();
        }
    }

    fn load_from_files(
        &mut self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<LoadReport> {
        let device = backend.device();
        let plan = LoadPlan::new(&self.checkpoint, &self.params, device, self.mapping)?;
        let report = plan.load(backend, cancel, progress)?;
        self.on_device = report.bytes;
        Ok(report)
    }

    fn copy_from_host(
        &mut self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<()> {
        let no_room = |_| backend.out_of_memory(0);
        let arena = Arena::new(self.params.len(), false).map_err(no_room)?;
        let mut tensors = Vec::with_capacity(self.params.len());
        for param in &self.params {
            tensors.push(
                arena
                    .tensor(param.dtype(), param.shape())
                    .map_err(no_room)?,
            );
        }
        let sizes = tensors.iter().map(|&tensor| {
            // SAFETY: the arena is alive to the end of this function.
            unsafe { bytes_on(tensor, backend.device()) }
        });
        let places = allocate(backend, sizes)?;
        let mut bytes = 0;
        for (done, (param, tensor)) in self.params.iter().zip(&tensors).enumerate() {
            cancel.check()?;
            bind(*tensor, &places[done], backend)?;
            let from = &self.on_host[done];
            let address = from
                .buffer
                .host_address()
                .ok_or_else(|| Error::WrongDevice {
                    what: param.name().to_owned(),
                    found: from.buffer.device().name(),
                    wanted: "the host".to_owned(),
                })?;
            // SAFETY: the parameter's bytes lie at its place in a buffer that the processor can read, which `on_host`
            // keeps; the tensor was just bound to fresh memory with room for as many.
            unsafe {
                sys::ggml_backend_tensor_set(
                    tensor.as_ptr(),
                    address.as_ptr().add(from.offset).cast(),
                    0,
                    param.bytes(),
                );
            }
            bytes += param.bytes() as u64;
            progress.report(&Progress::Loading {
                done: done + 1,
                total: self.params.len(),
                bytes,
            });
        }
        cancel.check()?;
        backend.device().check_connection()?;
        for (param, place) in self.params.iter().zip(places) {
            param.set_place(Some(place));
        }
        self.on_device = bytes;
        Ok(())
    }
}

impl fmt::Debug for Weights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Weights")
            .field("checkpoint", &self.checkpoint)
            .field("params", &self.params.len())
            .field("residence", &self.residence)
            .finish_non_exhaustive()
    }
}
