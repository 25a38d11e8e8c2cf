//! Plans over several devices: a plan for each device's part, and what is handed over between them.

use sd_backend::Backend;

use crate::error::{Error, Result};
use crate::graph::{Element, Graph, Recording};
use crate::plan::{Plan, Segmentation};
use crate::relay::{self, Link, Stage, Take};
use crate::run::{Cancel, Progress, Reporter, RunReport};
use crate::shape::Shape;
use crate::split::Split;

/// A graph whose segments run on several devices, one behind the other. The numbers are those of a [`Plan`] on devices
/// that compute alike.
///
/// Each device's part is a plan of its own: it runs in one piece, in segments, or with weights that come and go, as its
/// device's memory allows.
#[derive(Debug)]
pub struct SplitPlan {
    links: Vec<Link>,
}

impl SplitPlan {
    /// Builds the graph that `build` records, and takes memory for each part on the device that `split` gives it.
    /// `backends` are those of the split, in its order.
    ///
    /// # Errors
    /// Those of [`Plan::build`]; [`Error::WrongDevice`] if `backends` are not on the split's devices; [`Error::Graph`] if
    /// the graph has other segments than the one the split was made of.
    pub fn build(
        split: &Split,
        backends: &[&Backend],
        build: impl for<'g> FnOnce(Graph<'g>),
    ) -> Result<SplitPlan> {
        let devices = split.shares().iter().map(|share| share.device());
        let found: Vec<_> = backends.iter().map(|backend| backend.device()).collect();
        let wanted: Vec<_> = devices.collect();
        if found != wanted {
            let names = |devices: &[sd_backend::Device]| {
                let names: Vec<String> = devices.iter().map(|device| device.name()).collect();
                names.join(", ")
            };
            return Err(Error::WrongDevice {
                what: "the backends".to_owned(),
                found: names(&found),
                wanted: names(&wanted),
            });
        }
        let parts = split.parts(&Recording::of(build)?)?;
        let mut links: Vec<Link> = Vec::with_capacity(parts.len());
        let mut given: Vec<Vec<(crate::graph::TensorId, String)>> = Vec::new();
        for part in parts {
            let takes = part.takes.into_iter().map(|(id, input)| {
                let mut givers = given.iter().enumerate();
                let giver = givers.find_map(|(link, gives)| {
                    let output = gives.iter().find(|(given, _)| *given == id);
                    output.map(|(_, name)| (link, name.clone()))
                });
                // A part takes only what an earlier one keeps, and each gives all that later ones take.
                giver.map(|(link, output)| Take {
                    link,
                    output,
                    input,
                })
            });
            let takes = takes.flatten().collect();
            given.push(part.gives);
            let pool = &split.shares()[part.device].pool;
            links.push(Link {
                device: part.device,
                plan: Plan::of(
                    part.recording,
                    pool,
                    backends[part.device],
                    (&Cancel::new(), &mut |_: &Progress| {}),
                )?,
                takes,
            });
        }
        Ok(SplitPlan { links })
    }

    /// Gives an input its values for the next run, innermost dimension fastest.
    ///
    /// # Errors
    /// Those of [`Plan::set`].
    pub fn set<T: Element>(&mut self, name: &str, values: &[T]) -> Result<()> {
        for (number, link) in self.links.iter_mut().enumerate() {
            // The first part has all inputs.
            if number == 0 || link.plan.has_input(name) {
                link.plan.set(name, values)?;
            }
        }
        Ok(())
    }

    /// Computes all outputs, part by part, and says what each part took. `backends` are those of the split. Inputs are
    /// used up.
    ///
    /// # Errors
    /// Those of [`Plan::run`]. After an error the plan can be run again.
    pub fn run(
        &mut self,
        backends: &mut [&mut Backend],
        cancel: &Cancel,
    ) -> Result<Vec<RunReport>> {
        SplitPlan::run_together(&mut [self], backends, cancel, &mut |_: &Progress| {})
    }

    /// Runs several plans of one split: while one device computes its part of a plan, those before it compute theirs of
    /// the next. Says what each part took for all of them.
    ///
    /// # Errors
    /// Those of [`Plan::run`] of any of them; [`Error::WrongDevice`] if plans or `backends` are not those of one split.
    pub fn run_together(
        plans: &mut [&mut SplitPlan],
        backends: &mut [&mut Backend],
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Vec<RunReport>> {
        let Some(devices) = plans.first().map(|plan| plan.devices()) else {
            return Ok(Vec::new());
        };
        let mut stages = Vec::with_capacity(devices.len());
        let backends = backends.iter_mut().enumerate();
        for (_, backend) in backends.filter(|(number, _)| devices.contains(number)) {
            stages.push((&mut **backend, Vec::with_capacity(plans.len())));
        }
        for plan in plans {
            if plan.devices() != devices || stages.len() != devices.len() {
                return Err(Error::WrongDevice {
                    what: "a plan's split".to_owned(),
                    found: format!("{:?}", plan.devices()),
                    wanted: format!("{devices:?}"),
                });
            }
            for (link, (backend, passes)) in plan.links.iter_mut().zip(&mut stages) {
                link.plan.check(backend, |input| {
                    link.takes.iter().any(|take| take.input == input)
                })?;
                cancel.check()?;
                link.plan.acquire(backend, cancel, progress)?;
                passes.push(link);
            }
        }
        let stages = stages.into_iter();
        let stages = stages.map(|(backend, passes)| Stage { backend, passes });
        relay::run(stages.collect(), cancel, progress)
    }

    /// Numbers of the devices that have a part.
    fn devices(&self) -> Vec<usize> {
        self.links.iter().map(|link| link.device).collect()
    }

    /// Gives all memory of the devices back. The next run takes it again.
    pub fn release(&mut self) {
        for link in &mut self.links {
            link.plan.release();
        }
    }

    /// How each part runs now.
    pub fn segmentations(&self) -> Vec<Segmentation> {
        let links = self.links.iter();
        links.map(|link| link.plan.segmentation()).collect()
    }

    /// Bytes that the parts hold for what they compute, on all devices together.
    pub fn compute_bytes(&self) -> u64 {
        let links = self.links.iter();
        links.map(|link| link.plan.compute_bytes()).sum()
    }

    /// Reads an output of the last run, innermost dimension fastest.
    ///
    /// # Errors
    /// Those of [`Plan::read`].
    pub fn read<T: Element>(&self, name: &str) -> Result<Vec<T>> {
        self.last(name)?.read(name)
    }

    /// Shape of an output, outermost first.
    ///
    /// # Errors
    /// [`Error::UnknownName`].
    pub fn output_shape(&self, name: &str) -> Result<Shape> {
        self.last(name)?.output_shape(name)
    }

    /// The part that has the outputs. A split of no devices has none.
    fn last(&self, name: &str) -> Result<&Plan> {
        let link = self.links.last().ok_or_else(|| Error::NotRun {
            name: name.to_owned(),
        })?;
        Ok(&link.plan)
    }
}
