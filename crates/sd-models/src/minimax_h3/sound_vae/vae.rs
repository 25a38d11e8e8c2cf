//! The VAE by itself: its files, sound in and out.

use std::path::Path;

use sd_backend::{Backend, DType, DeviceKind, Mapping, Residence};
use sd_graph::{
    Cancel, Checkpoint, Estimate, Graph, LoadOptions, Plan, Progress, Reporter, Scope, Weights,
};

use super::super::statistics::vector;
use super::activation::is_filter;
use super::attention::Narrowing;
use super::config::Config;
use super::decoder::Decoder;
use super::encoder::Encoder;
use super::layers::Way;
use super::names::VAE;
use super::pieces::{Piece, Pieces};
use crate::error::{Error, Result};
use crate::families::part_in;
use crate::part::Part;
use crate::sound::Sound;

/// Channels of sound: left and right.
const CHANNELS: usize = 2;

/// Latents that are decoded at a time, four seconds, and those whose samples are encoded at a time: the encoder has eight times as many
/// numbers for each.
const DECODED: usize = 160;
const ENCODED: usize = 64;

/// Fewest latents at a time, when memory does not suffice for more.
const FEWEST: usize = 8;

/// Most latents of a sound that is encoded, all of which attend to all before them: 102 seconds.
const MOST: usize = 4096;

/// Latents of a sound in two channels, `[2, count, latent_channels]`, brought to mean 0 and deviation 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Latents {
    /// How many there are of each channel.
    pub count: usize,
    /// Channel by channel, latent by latent.
    pub values: Vec<f32>,
}

/// The VAE. Opening it checks names and shapes of all tensors; the weights of each half are loaded when it is first used.
#[derive(Debug)]
pub struct SoundVae {
    config: Config,
    encoder: Part<(Encoder, Narrowing)>,
    decoder: Part<Decoder>,
}

impl SoundVae {
    /// Opens the VAE: a folder with `config.json` and weights, as diffusers has it, or a file of weights, whose configuration is
    /// the `config.json` beside it or, where there is none, what metadata, names and shapes say. No weight is read.
    ///
    /// # Errors
    /// Everything that can be wrong with files; see [`Error`].
    pub fn open(path: &Path) -> Result<SoundVae> {
        let beside = match path.parent() {
            Some(folder) if path.is_file() => folder.join("config.json"),
            _ => path.join("config.json"),
        };
        let checkpoint = Checkpoint::open(path)?;
        let checkpoint = part_in(&checkpoint, &VAE)?.select(&checkpoint)?;
        let read = || Config::read(&beside, &checkpoint);
        let config = match path.is_file() {
            true if !beside.is_file() => Config::of(&checkpoint)?,
            // What stands beside a single file may be about another.
            true => read().or_else(|_| Config::of(&checkpoint))?,
            false => read()?,
        };
        SoundVae::new(&checkpoint, config)
    }

    fn new(checkpoint: &Checkpoint, config: Config) -> Result<SoundVae> {
        let mut names = checkpoint.tensors().map(|(name, _)| name);
        let is_other = |name: &&str| {
            name.ends_with(".filter")
                && vector(checkpoint, name).is_some_and(|stored| !is_filter(&stored))
        };
        if let Some(name) = names.find(is_other) {
            return Err(Error::Config {
                path: checkpoint.path().to_owned(),
                reason: format!("{name} is another filter than the activations of this VAE have"),
            });
        }
        let known = |root: &Scope<'_>, other: &[&str]| {
            for name in other.iter().chain(&["latents_mean", "latents_std"]) {
                root.ignore(name);
            }
        };
        // In single precision whatever the file has, and whatever is asked for the other parts.
        let options = LoadOptions::default().weight_type(DType::F32);
        let options = options.component("audio_vae");
        let encoder = Part::open(checkpoint, options.clone(), |root| {
            // Only what samples latents needs their deviations.
            known(root, &["decoder", "dec_in_proj", "logs_proj"]);
            (Encoder::new(root, &config), Narrowing::new(root, &config))
        })?;
        let decoder = Part::open(checkpoint, options, |root| {
            known(root, &["encoder", "pre_block", "mean_proj", "logs_proj"]);
            Decoder::new(root, &config)
        })?;
        Ok(SoundVae {
            config,
            encoder,
            decoder,
        })
    }

    /// Says whether the weights' files may be used where they lie in memory: [`Mapping::Auto`] if not called.
    pub fn mapping(mut self, mapping: Mapping) -> SoundVae {
        for weights in [&mut self.encoder.weights, &mut self.decoder.weights] {
            weights.live(Residence::Device, mapping);
        }
        self
    }

    /// The configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes the weights of both halves out of memory; they come back when they are needed.
    pub fn unload(&mut self) {
        self.encoder.weights.unload();
        self.decoder.weights.unload();
    }

    /// Bytes that decoding so many latents of each channel takes on the device of `backend`: of weights, and beside them.
    ///
    /// # Errors
    /// The engine's.
    pub fn decoding_need(&self, backend: &Backend, count: usize) -> Result<(u64, u64)> {
        let pieces = Pieces::new(count.max(1), DECODED, self.config.decoder_reach());
        let way = Way::of(backend.device());
        let estimate = Estimate::of(backend, |g| self.decoding(g, pieces.length, way))?;
        let bytes = estimate.compute_bytes + estimate.constant_bytes;
        need(&self.decoder.weights, backend, bytes)
    }

    /// Bytes that encoding so many samples of each channel takes on the device of `backend`: of weights, and beside them.
    ///
    /// # Errors
    /// The engine's.
    pub fn encoding_need(&self, backend: &Backend, samples: usize) -> Result<(u64, u64)> {
        let count = self.config.latents(samples).clamp(1, MOST);
        let pieces = Pieces::new(count, ENCODED, self.config.encoder_reach());
        let way = Way::of(backend.device());
        let convolutions = Estimate::of(backend, |g| self.encoding(g, pieces.length, way))?;
        let attention = Estimate::of(backend, |g| self.narrowing(g, count))?;
        let bytes = |estimate: Estimate| estimate.compute_bytes + estimate.constant_bytes;
        let most = bytes(convolutions).max(bytes(attention));
        need(&self.encoder.weights, backend, most)
    }

    fn decoding(&self, g: Graph<'_>, length: usize, way: Way) {
        let z = g.input::<f32>("latents", [CHANNELS, self.config.latent_channels, length]);
        g.output("samples", self.decoder.module.forward(z, way));
    }

    fn encoding(&self, g: Graph<'_>, length: usize, way: Way) {
        let samples = length * self.config.hop();
        let x = g.input::<f32>("samples", [CHANNELS, 1, samples]);
        g.output("wide", self.encoder.module.0.forward(x, way));
    }

    fn narrowing(&self, g: Graph<'_>, count: usize) {
        let x = g.input::<f32>("wide", [count, self.config.latent_dim]);
        g.output("latents", self.encoder.module.1.forward(x));
    }

    /// The sound of `latents`: `hop` samples of each of two channels for each, from -1 to 1.
    ///
    /// Pieces of it are decoded one after the other, shorter ones where memory runs out; the samples are the same. Each is told to
    /// `progress`.
    ///
    /// # Errors
    /// [`Error::Clip`] for no latents, or values that are not as many as they say; files, memory, or a cancelled run.
    pub fn decode(
        &mut self,
        backend: &mut Backend,
        latents: &Latents,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Sound> {
        let (count, width) = (latents.count, self.config.latent_channels);
        expect("latents", count, count.max(1))?;
        let wanted = count.saturating_mul(CHANNELS * width);
        expect("latent values", latents.values.len(), wanted)?;
        self.decoder.weights.bring(backend, cancel, progress)?;
        let channels = shrinking(DECODED, |kept| {
            self.decode_by(backend, latents, kept, (cancel, &mut *progress))
        })?;
        Sound::new(self.config.sampling_rate, channels).ok_or(Error::Clip {
            what: "channels",
            found: 0,
            wanted: CHANNELS,
        })
    }

    fn decode_by(
        &self,
        backend: &mut Backend,
        latents: &Latents,
        kept: usize,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
    ) -> Result<Vec<Vec<f32>>> {
        let (hop, width) = (self.config.hop(), self.config.latent_channels);
        let (mean, std) = (&self.config.latents_mean, &self.config.latents_std);
        let pieces = Pieces::new(latents.count, kept, self.config.decoder_reach());
        let length = pieces.length;
        let way = Way::of(backend.device());
        let mut plan = Plan::build(backend, |g| self.decoding(g, length, way))?;
        let mut channels = vec![Vec::new(); CHANNELS];
        let total = pieces.iter().count();
        for (index, Piece { start, kept }) in pieces.iter().enumerate() {
            // Number by number for the convolutions, latent by latent as they come.
            let each = (0..CHANNELS).flat_map(|channel| {
                (0..width).flat_map(move |number| {
                    (start..start + length).map(move |latent| {
                        let value =
                            latents.values[(channel * latents.count + latent) * width + number];
                        value * std[number] + mean[number]
                    })
                })
            });
            let values: Vec<f32> = each.collect();
            plan.set("latents", &values)?;
            plan.run(backend, cancel)?;
            let samples: Vec<f32> = plan.read("samples")?;
            let within = (kept.start - start) * hop..(kept.end - start) * hop;
            for (all, piece) in channels.iter_mut().zip(samples.chunks_exact(length * hop)) {
                all.extend(
                    piece[within.clone()]
                        .iter()
                        .map(|sample| sample.clamp(-1.0, 1.0)),
                );
            }
            let done = index + 1;
            progress.report(&Progress::Chunk { done, total });
        }
        Ok(channels)
    }

    /// The means of the latents of a sound of any rate and any channels; silence fills it up to a whole latent.
    ///
    /// Pieces of it go through the convolutions one after the other, shorter ones where memory runs out; the latents are the same.
    /// Each is told to `progress`.
    ///
    /// # Errors
    /// [`Error::Clip`] for a sound without samples, or of more than 4096 latents (102 seconds at 32 kHz); files, memory, or a
    /// cancelled run.
    pub fn encode(
        &mut self,
        backend: &mut Backend,
        sound: &Sound,
        cancel: &Cancel,
        progress: &mut dyn Reporter,
    ) -> Result<Latents> {
        let most = MOST * self.config.hop();
        let rate = self.config.sampling_rate;
        let too_long = |found| Error::Clip {
            what: "samples",
            found,
            wanted: most,
        };
        if sound.seconds() * f64::from(rate) > most as f64 {
            return Err(too_long(sound.samples()));
        }
        let sound = sound.stereo().resampled(rate);
        let sound = sound.ok_or_else(|| too_long(0))?;
        let count = self.config.latents(sound.samples());
        expect("samples", sound.samples(), sound.samples().max(1))?;
        self.encoder.weights.bring(backend, cancel, progress)?;
        let wide = shrinking(ENCODED, |kept| {
            self.widen_by(backend, &sound, kept, (cancel, &mut *progress))
        })?;
        let mut values = Vec::new();
        let mut plan = Plan::build(backend, |g| self.narrowing(g, count))?;
        for channel in &wide {
            plan.set("wide", channel)?;
            plan.run(backend, cancel)?;
            values.extend(plan.read::<f32>("latents")?);
        }
        let statistics = self
            .config
            .latents_mean
            .iter()
            .zip(&self.config.latents_std);
        for (value, (mean, std)) in values.iter_mut().zip(statistics.cycle()) {
            *value = (*value - mean) / std;
        }
        Ok(Latents { count, values })
    }

    /// What the convolutions make of each channel, `[count, latent_dim]`.
    fn widen_by(
        &self,
        backend: &mut Backend,
        sound: &Sound,
        kept: usize,
        (cancel, progress): (&Cancel, &mut dyn Reporter),
    ) -> Result<Vec<Vec<f32>>> {
        let (hop, width) = (self.config.hop(), self.config.latent_dim);
        let count = self.config.latents(sound.samples());
        let pieces = Pieces::new(count, kept, self.config.encoder_reach());
        let length = pieces.length;
        let way = Way::of(backend.device());
        let mut plan = Plan::build(backend, |g| self.encoding(g, length, way))?;
        let mut channels = vec![Vec::new(); CHANNELS];
        let total = pieces.iter().count();
        for (index, Piece { start, kept }) in pieces.iter().enumerate() {
            let mut values = Vec::with_capacity(CHANNELS * length * hop);
            for (side, channel) in sound.channels().iter().enumerate() {
                let end = ((start + length) * hop).min(channel.len());
                values.extend_from_slice(channel.get(start * hop..end).unwrap_or_default());
                values.resize((side + 1) * length * hop, 0.0);
            }
            plan.set("samples", &values)?;
            plan.run(backend, cancel)?;
            let wide: Vec<f32> = plan.read("wide")?;
            let within = (kept.start - start) * width..(kept.end - start) * width;
            for (all, piece) in channels.iter_mut().zip(wide.chunks_exact(length * width)) {
                all.extend_from_slice(&piece[within.clone()]);
            }
            let done = index + 1;
            progress.report(&Progress::Chunk { done, total });
        }
        Ok(channels)
    }
}

/// Bytes of `weights` as they lie on the device of `backend`, and the most that are taken beside them while they are loaded or
/// `computing` bytes are.
fn need(weights: &Weights, backend: &Backend, computing: u64) -> Result<(u64, u64)> {
    let device = backend.device();
    let cost = weights.cost(device, Residence::Device, weights.mapping())?;
    let beside = match device.kind() {
        DeviceKind::Cpu => computing.max(cost.staging),
        _ => computing,
    };
    Ok((cost.resident(), beside))
}

/// Does `work` with so many latents at a time, and where memory runs out with half as many, again and again.
fn shrinking<T>(most: usize, mut work: impl FnMut(usize) -> Result<T>) -> Result<T> {
    let mut kept = most;
    loop {
        match work(kept) {
            Err(error) if error.is_out_of_memory() && kept > FEWEST => {
                tracing::warn!("{error}; trying again in shorter pieces");
                kept /= 2;
            }
            outcome => return outcome,
        }
    }
}

fn expect(what: &'static str, found: usize, wanted: usize) -> Result<()> {
    match found == wanted {
        true => Ok(()),
        false => Err(Error::Clip {
            what,
            found,
            wanted,
        }),
    }
}
