//! The parameters of one part of a model, which may come and go.

use std::fmt;

use sd_backend::{Backend, BackendOptions, Device, Mapping, MemoryKind, Residence};

use crate::checkpoint::Checkpoint;
use crate::error::Result;
use crate::load::{LoadReport, allocate, unload};
use crate::load_plan::{LoadCost, LoadPlan};
use crate::param::{Home, Param, Place};
use crate::raw::{Arena, bytes_for};
use crate::run::{Cancel, Progress, Reporter};
use crate::transfer::Target;

/// The parameters that a part of a model declared against a checkpoint, and where they live while it does not run.
pub struct Weights {
    checkpoint: Checkpoint,
    params: Vec<Param>,
    residence: Residence,
    mapping: Mapping,
    is_streamed: bool,
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
            is_streamed: false,
            on_host: Vec::new(),
            on_device: 0,
        }
    }

    /// Says where the parameters live, and whether their files may be mapped. Takes them out of memory if they were
    /// loaded.
    pub fn live(&mut self, residence: Residence, mapping: Mapping) {
        self.unload();
        self.on_host.clear();
        for param in &self.params {
            param.set_home(None);
        }
        self.checkpoint.release_mappings();
        self.residence = residence;
        self.mapping = mapping;
        self.is_streamed = false;
    }

    /// Says whether parameters that live on the host or on the disk stay there while they are used, too: plans then keep
    /// as many of them on the device as its memory allows, and the others come and go segment by segment.
    pub fn stream(&mut self, is_streamed: bool) {
        self.is_streamed = is_streamed;
    }

    /// Whether they come and go segment by segment.
    pub fn is_streamed(&self) -> bool {
        self.is_streamed && self.residence != Residence::Device
    }

    /// The parameters.
    pub fn params(&self) -> &[Param] {
        &self.params
    }

    /// Where they live.
    pub fn residence(&self) -> Residence {
        self.residence
    }

    /// Whether [`Weights::load`] has seen to it that they are on the host or on the disk, for those that live there.
    pub fn is_home(&self) -> bool {
        self.params.iter().all(|param| param.home().is_some())
    }

    /// Whether their files may be mapped.
    pub fn mapping(&self) -> Mapping {
        self.mapping
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
            Residence::Host => self.load_to_host(backend, cancel, progress),
            Residence::Disk => {
                for param in &self.params {
                    param.set_home(Some(Home::File(self.checkpoint.clone())));
                }
                Ok(LoadReport::default())
            }
        }
    }

    /// Loads them into memory of the host that the device of `backend` copies from: pinned if it offers that, else in place
    /// in their files where these may be mapped.
    fn load_to_host(
        &mut self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<LoadReport> {
        let options = BackendOptions::default()
            .threads(1)
            .ledger(backend.ledger());
        let host = Backend::new(Device::cpu()?, &options)?;
        let device = Some(backend.device())
            .filter(|device| device.has_pinned_memory() && self.mapping != Mapping::Always);
        let mut fetch = |mapping: Mapping, for_device: Option<Device>| {
            LoadPlan::new(&self.checkpoint, &self.params, host.device(), mapping)?
                .fetch(&host, for_device, cancel, progress)
        };
        let (places, report) = match device {
            None => fetch(self.mapping, None)?,
            Some(_) => match fetch(Mapping::Never, device) {
                // Pages of files can be given up; pinned memory cannot.
                Err(error) if error.is_out_of_memory() && self.mapping == Mapping::Auto => {
                    tracing::warn!("{error}; weights stay in their files");
                    fetch(self.mapping, None)?
                }
                outcome => outcome?,
            },
        };
        for (param, place) in self.params.iter().zip(&places) {
            param.set_home(Some(Home::Host(place.clone())));
        }
        self.on_host = places;
        Ok(report)
    }

    /// Makes sure that they are in the memory of the device of `backend`, for a run; those that are
    /// [streamed](Weights::stream) are left to the plans.
    ///
    /// # Errors
    /// As for [`LoadPlan::load`].
    pub fn bring(
        &mut self,
        backend: &Backend,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<()> {
        if self.is_streamed() || self.params.iter().all(Param::is_loaded) {
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
        let mut sizes = Vec::with_capacity(self.params.len());
        for param in &self.params {
            let bytes = bytes_for(param.dtype(), param.shape(), backend.device());
            sizes.push(bytes.ok_or_else(|| backend.out_of_memory(0))?);
        }
        let places = allocate(backend, sizes.into_iter(), MemoryKind::Weights)?;
        let mut bytes = 0;
        for (done, param) in self.params.iter().enumerate() {
            cancel.check()?;
            Target::new(&arena, param, &places[done], backend)?.copy_from(
                &self.on_host[done],
                param,
                None,
            )?;
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
