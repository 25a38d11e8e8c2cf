//! Room in memory for the parts of a pipeline of pictures: made before a picture, and given up where memory runs out.

use sd_backend::{Backend, Component, Device};
use sd_graph::{Cancel, Relief, Reporter, with_relief};

use crate::builder::seat;
use crate::denoising::evict;
use crate::error::Result;
use crate::pipeline::Pipeline;
use crate::qwen_image_2_1::{Canvas, Condition, IN_ORDER, QwenImage21, Scene, find_largest};
use crate::request::Request;
use crate::seating::DeviceNeed;

impl Pipeline {
    /// Does `work` with `component` in the memory of its device, and takes it out again if it does not live there.
    pub(crate) fn with_part<T>(
        &mut self,
        component: Component,
        progress: &mut dyn Reporter,
        work: impl FnOnce(&mut QwenImage21, &mut Backend, &Cancel, &mut dyn Reporter) -> Result<T>,
    ) -> Result<T> {
        let device = self.device_of(component);
        let backend = self.backends.on(device)?;
        let weights = self.model.weights_mut(component);
        let brought = weights.bring(backend, &self.cancel, progress);
        let outcome = match brought {
            Ok(()) => work(&mut self.model, backend, &self.cancel, progress),
            Err(error) => Err(error.into()),
        };
        self.model.release(component);
        outcome
    }

    /// Does `work` with `component`; if memory runs out, gives up what can be had again (all plans, the weights of other
    /// parts on the same device, what is kept of prompts) and does it once more.
    pub(crate) fn with_retry<T>(
        &mut self,
        component: Component,
        work: impl FnMut(&mut Pipeline) -> Result<T>,
    ) -> Result<T> {
        let idle = self.neighbours(component);
        self.with_retry_beside(idle, work)
    }

    /// As [`Pipeline::with_retry`], for work that needs the weights of no part of `idle`.
    pub(crate) fn with_retry_beside<T>(
        &mut self,
        idle: Vec<Component>,
        mut work: impl FnMut(&mut Pipeline) -> Result<T>,
    ) -> Result<T> {
        let outcome = with_relief(
            &mut Working {
                pipeline: self,
                idle,
            },
            |working| work(working.pipeline),
        );
        outcome.map_err(|error| self.seating.explain(error))
    }

    /// All parts on `device`.
    pub(crate) fn parts_on(&self, device: Device) -> Vec<Component> {
        let parts = IN_ORDER.into_iter();
        parts
            .filter(|&part| self.device_of(part) == device)
            .collect()
    }

    /// The other parts on the device that runs `component`.
    pub(crate) fn neighbours(&self, component: Component) -> Vec<Component> {
        let mut others = self.parts_on(self.device_of(component));
        others.retain(|&other| other != component);
        others
    }

    /// Sees to it that every part can run for this picture: if what stays on a device leaves too little, parts whose
    /// place nobody chose come and go from now on.
    ///
    /// A picture that cannot be decoded at once is decoded in the largest squares that fit, unless the request has its own.
    /// Refuses one that would not fit even so, and says what would do.
    pub(crate) fn make_room(
        &mut self,
        request: &Request<'_>,
        negative: Option<&Condition>,
        canvas: Canvas,
        reads_prefix: bool,
        progress: &mut dyn Reporter,
    ) -> Result<Canvas> {
        let own: Vec<&Condition> = [request.condition].into_iter().chain(negative).collect();
        let longest = own.iter().max_by_key(|condition| condition.prefix_tokens());
        let scene = Scene {
            prompt: longest.map_or(&[], |condition| &condition.segments),
            reading: &[],
            passes: 1 + u64::from(negative.is_some()),
            canvas,
            reads_prefix,
        };
        self.fit(scene, &own, progress)
    }

    /// As [`Pipeline::make_room`] for a `scene`, in which `own` are the conditions that have to stay as they are.
    pub(crate) fn fit(
        &mut self,
        scene: Scene<'_>,
        own: &[&Condition],
        progress: &mut dyn Reporter,
    ) -> Result<Canvas> {
        let noted = self.seating.held(&|device| self.held_on(device));
        let held = |device| {
            let kept: u64 = own
                .iter()
                .map(|condition| condition.prefix_bytes(device))
                .sum();
            noted(device) + kept
        };
        let (model, wishes) = (&self.model, &self.wishes);
        let (mut seating, mut canvas) =
            find_largest(model, wishes, &mut self.backends, scene, held)?;
        let is_easy = seating.devices.iter().all(DeviceNeed::fits)
            && seating.prefix.is_none_or(|prefix| prefix.fits)
            && seating.is_like(&self.seating);
        // What is kept of other prompts goes before anything is moved.
        if !is_easy && self.model.drop_other_prefixes(own) {
            let (model, wishes) = (&self.model, &self.wishes);
            (seating, canvas) = find_largest(model, wishes, &mut self.backends, scene, held)?;
        }
        seating.check(self.backends.ledger())?;
        if self.seating.gives_way_to(&seating) {
            for component in IN_ORDER {
                self.model.evict(component);
            }
            self.loaded = seat(
                &mut self.model,
                &seating,
                &mut self.backends,
                &self.cancel,
                progress,
            )?;
            self.seating = seating;
        } else {
            // Where things are stays; what they need, and whether they stream for it, is this picture's.
            for (seat, component) in seating.seats.iter().zip(IN_ORDER) {
                self.model.weights_mut(component).stream(seat.is_streamed);
            }
            self.seating.settle(seating);
        }
        Ok(canvas)
    }

    /// Bytes of `device` that this pipeline holds and could give back.
    fn held_on(&self, device: Device) -> u64 {
        IN_ORDER
            .into_iter()
            .filter(|&component| self.device_of(component) == device)
            .map(|component| {
                self.model.weights(component).device_bytes()
                    + self.model.compute_bytes_of(component)
            })
            .sum()
    }
}

/// Whoever runs a part of a pipeline.
struct Working<'p> {
    pipeline: &'p mut Pipeline,
    /// Other parts on the same device.
    idle: Vec<Component>,
}

impl Relief for Working<'_> {
    fn release_plans(&mut self) -> bool {
        self.pipeline.model.drop_plans()
    }

    fn evict_weights(&mut self) -> bool {
        evict(&mut self.pipeline.model, &self.idle)
    }

    fn drop_caches(&mut self) -> bool {
        self.pipeline.model.drop_prefixes()
    }
}
