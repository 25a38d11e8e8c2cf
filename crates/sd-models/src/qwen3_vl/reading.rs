//! Looking at pictures, and reading texts that they are in.

use sd_backend::{Backend, Mapping, Residence};
use sd_graph::{
    Cancel, Estimate, Graph, LoadOptions, Plan, PlanCache, Progress, Reporter, Weights,
};

use super::{Config, Pictures, TextModel, VisionConfig, VisionTower};
use crate::error::Result;
use crate::part::Part;
use crate::rope::{self, Size};
use crate::sources::Source;

/// What the vision tower makes of a picture.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Seen {
    /// What stands in its place in a text, `[tokens, hidden]`.
    pub(crate) embeddings: Vec<f32>,
    /// What is added behind the first layers of the language model, `[tokens, hidden]` each.
    pub(crate) deepstack: Vec<Vec<f32>>,
}

impl Seen {
    /// How many numbers it has.
    pub(crate) fn numbers(&self) -> usize {
        self.embeddings.len() + self.deepstack.iter().map(Vec::len).sum::<usize>()
    }
}

/// A vision tower whose weights are in memory only while it looks.
#[derive(Debug)]
pub(crate) struct Sight {
    tower: Part<VisionTower>,
    plans: PlanCache<Size>,
}

impl Sight {
    /// Declares the tower of the text encoder `text`.
    ///
    /// # Errors
    /// What does not fit.
    pub(crate) fn open(
        text: &Source<Config>,
        vision: &VisionConfig,
        options: &LoadOptions,
    ) -> Result<Sight> {
        let options = options.clone().component("text_encoder");
        let mut tower = Part::open(&text.checkpoint, options, |root| {
            VisionTower::new(root, vision)
        })?;
        // Of its file it is a part, and what is mapped counts as a whole.
        tower.weights.live(Residence::Disk, Mapping::Never);
        Ok(Sight {
            tower,
            plans: PlanCache::new(1),
        })
    }

    /// How many features of a picture are added behind layers of the language model.
    pub(crate) fn features(&self) -> usize {
        self.tower.module.config().deepstack_visual_indexes.len()
    }

    /// The tower's weights.
    pub(crate) fn weights(&self) -> &Weights {
        &self.tower.weights
    }

    /// What looking at a picture of `grid` patches takes beside them.
    pub(crate) fn estimate(&self, backend: &Backend, grid: Size) -> Result<Estimate> {
        Ok(Estimate::of(backend, |g| {
            tower_graph(g, &self.tower.module, grid);
        })?)
    }

    /// Says whether the tower's weights pass through its device while it looks.
    pub(crate) fn stream(&mut self, is_streamed: bool) {
        self.tower.weights.stream(is_streamed);
    }

    /// Gives up everything that it has in memory.
    pub(crate) fn release(&mut self) {
        self.plans.clear();
        self.tower.weights.release();
    }

    /// Looks at the patches of a picture of `grid` of them. What it takes stays for the next picture.
    ///
    /// # Errors
    /// The engine's.
    pub(crate) fn look(
        &mut self,
        backend: &mut Backend,
        (patches, grid): (&[f32], Size),
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Seen> {
        let weights = &mut self.tower.weights;
        weights.load(backend, cancel, &mut |_: &Progress| {})?;
        weights.bring(backend, cancel, &mut |_: &Progress| {})?;
        let module = &self.tower.module;
        let plan = self
            .plans
            .get_or_build_with(grid, backend, cancel, progress, |g| {
                tower_graph(g, module, grid);
            })?;
        plan.set("patches", patches)?;
        plan.run_with(backend, cancel, progress)?;
        let features = module.config().deepstack_visual_indexes.len();
        Ok(Seen {
            embeddings: plan.read("embeddings")?,
            deepstack: (0..features)
                .map(|index| Ok(plan.read(&deepstack(index))?))
                .collect::<Result<_>>()?,
        })
    }
}

/// The output that is added behind layer `index`.
fn deepstack(index: usize) -> String {
    format!("deepstack {index}")
}

fn tower_graph(g: Graph<'_>, module: &VisionTower, grid: Size) {
    let shape = [grid.height * grid.width, module.config().patch_values()];
    let seen = module.forward(g, grid, g.input::<f32>("patches", shape));
    g.output("embeddings", seen.embeddings);
    for (index, features) in seen.deepstack.into_iter().enumerate() {
        g.output(&deepstack(index), features);
    }
}

/// Reads `parts`, with `features` that are added to those that are pictures.
pub(crate) fn text_graph(g: Graph<'_>, module: &TextModel, parts: &[rope::Part], features: usize) {
    let tokens = |is_text: bool| -> usize {
        let parts = parts.iter();
        let kind = parts.filter(|part| matches!(part, rope::Part::Text(_)) == is_text);
        kind.map(|part| part.tokens()).sum()
    };
    let ids = g.input::<i32>("token_ids", [tokens(true)]);
    let hidden = match tokens(false) {
        0 => module.forward(g, ids),
        pictures => {
            let shape = [pictures, module.config().hidden_size];
            let pictures = Pictures {
                embeddings: g.input::<f32>("pictures", shape),
                deepstack: (0..features)
                    .map(|index| g.input::<f32>(&deepstack(index), shape))
                    .collect(),
            };
            module.forward_with_pictures(g, parts, ids, &pictures)
        }
    };
    g.output("hidden", hidden);
}

/// Gives a plan of [`text_graph`] what was seen of the pictures in its text, in their order, with so many `features` each.
///
/// # Errors
/// The engine's.
pub(crate) fn set_pictures<'s>(
    plan: &mut Plan,
    pictures: impl Iterator<Item = &'s Seen> + Clone,
    features: usize,
) -> Result<()> {
    if pictures.clone().next().is_none() {
        return Ok(());
    }
    let embeddings = pictures.clone().flat_map(|picture| &picture.embeddings);
    plan.set("pictures", &embeddings.copied().collect::<Vec<f32>>())?;
    for index in 0..features {
        let added = pictures.clone();
        let added = added.filter_map(|picture| picture.deepstack.get(index));
        let added: Vec<f32> = added.flatten().copied().collect();
        plan.set(&deepstack(index), &added)?;
    }
    Ok(())
}
