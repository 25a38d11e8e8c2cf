//! Which device runs which part of a model, and where that part's parameters live.

use std::fmt;
use std::str::FromStr;

use crate::device::Device;
use crate::error::{Bytes, Error, Result};

/// A part of a model that runs by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Component {
    /// What is called once or more for each step; served first.
    Diffusion,
    /// What reads the prompt.
    TextEncoder,
    /// What turns latents into pictures and back.
    Vae,
}

impl Component {
    /// All, in the order in which automatic placement serves them.
    pub const ALL: [Component; 3] = [Component::Diffusion, Component::TextEncoder, Component::Vae];

    /// `diffusion`, `text-encoder`, `vae`.
    pub const fn name(self) -> &'static str {
        match self {
            Component::Diffusion => "diffusion",
            Component::TextEncoder => "text-encoder",
            Component::Vae => "vae",
        }
    }
}

impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where a component's parameters are while it does not run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Residence {
    /// In the memory of the device that computes with them.
    Device,
    /// In the host's memory, as the device wants them; copied to the device for as long as the component runs.
    Host,
    /// In their files; loaded for as long as the component runs.
    Disk,
}

impl Residence {
    /// `device`, `host`, `disk`.
    pub const fn name(self) -> &'static str {
        match self {
            Residence::Device => "device",
            Residence::Host => "host",
            Residence::Disk => "disk",
        }
    }
}

impl fmt::Display for Residence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a caller wants for one component; what is left open is chosen.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Wish {
    /// The device, in the words of [`Device::select`], or the device itself.
    pub device: Option<DeviceChoice>,
    /// Where the parameters live.
    pub residence: Option<Residence>,
}

/// A device, named or at hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Words for [`Device::select`].
    Named(String),
    /// A device that the caller has.
    Is(Device),
}

impl DeviceChoice {
    /// The device.
    ///
    /// # Errors
    /// As for [`Device::select`].
    pub fn resolve(&self) -> Result<Device> {
        match self {
            DeviceChoice::Named(words) => Device::select(words),
            DeviceChoice::Is(device) => Ok(*device),
        }
    }
}

impl From<&str> for DeviceChoice {
    fn from(words: &str) -> Self {
        DeviceChoice::Named(words.to_owned())
    }
}

impl From<String> for DeviceChoice {
    fn from(words: String) -> Self {
        DeviceChoice::Named(words)
    }
}

impl From<Device> for DeviceChoice {
    fn from(device: Device) -> Self {
        DeviceChoice::Is(device)
    }
}

/// What a caller wants for every component.
///
/// As text: `cuda0` for all of them, or a list such as `diffusion=cuda0,vae=cpu,text-encoder=cuda0@disk`. A residence
/// follows an `@`; it may stand alone (`diffusion=@host`). Components that are not named, and everything that is left
/// open, are chosen automatically.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Placement {
    wishes: [Wish; 3],
}

impl Placement {
    /// What is wanted for `component`.
    pub fn of(&self, component: Component) -> &Wish {
        &self.wishes[component as usize]
    }

    /// Sets the device of every component that has none yet.
    #[must_use]
    pub fn or_device(mut self, device: &DeviceChoice) -> Placement {
        for wish in &mut self.wishes {
            wish.device.get_or_insert_with(|| device.clone());
        }
        self
    }

    /// Sets the device of `component`.
    #[must_use]
    pub fn device(mut self, component: Component, device: impl Into<DeviceChoice>) -> Placement {
        self.wishes[component as usize].device = Some(device.into());
        self
    }

    /// Sets where the parameters of `component` live.
    #[must_use]
    pub fn residence(mut self, component: Component, residence: Residence) -> Placement {
        self.wishes[component as usize].residence = Some(residence);
        self
    }
}

impl FromStr for Placement {
    type Err = Error;

    fn from_str(text: &str) -> Result<Placement> {
        if !text.contains('=') {
            let wish = parse_wish(text)?;
            return Ok(Placement {
                wishes: [wish.clone(), wish.clone(), wish],
            });
        }
        let mut placement = Placement::default();
        for entry in text.split(',') {
            let wrong = |reason| Error::Placement {
                text: entry.trim().to_owned(),
                reason,
            };
            let (name, wish) = entry
                .split_once('=')
                .ok_or_else(|| wrong("a list has the form diffusion=cuda0,vae=cpu@disk"))?;
            let component = Component::ALL
                .into_iter()
                .find(|component| component.name().eq_ignore_ascii_case(name.trim()))
                .ok_or_else(|| wrong("the components are diffusion, text-encoder and vae"))?;
            let wanted = &mut placement.wishes[component as usize];
            if *wanted != Wish::default() {
                return Err(wrong("the component is named twice"));
            }
            *wanted = parse_wish(wish)?;
        }
        Ok(placement)
    }
}

/// `cuda0`, `cuda0@disk`, `@host`.
fn parse_wish(text: &str) -> Result<Wish> {
    let wrong = |reason| Error::Placement {
        text: text.trim().to_owned(),
        reason,
    };
    let (device, residence) = match text.split_once('@') {
        Some((device, residence)) => (device.trim(), Some(residence.trim())),
        None => (text.trim(), None),
    };
    let residence = match residence.map(str::to_lowercase).as_deref() {
        None => None,
        Some("device") => Some(Residence::Device),
        Some("host") => Some(Residence::Host),
        Some("disk") => Some(Residence::Disk),
        Some(_) => {
            return Err(wrong(
                "parameters live on the device, on the host or on the disk",
            ));
        }
    };
    if device.is_empty() && residence.is_none() {
        return Err(wrong("the name of a device is missing"));
    }
    Ok(Wish {
        device: (!device.is_empty()).then(|| device.into()),
        residence,
    })
}

/// What one component needs on its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    /// Which.
    pub component: Component,
    /// The device that runs it.
    pub device: Device,
    /// Where its parameters are to live, if that was said.
    pub residence: Option<Residence>,
    /// Bytes of its parameters on the device.
    pub weights: u64,
    /// Bytes that it computes in, beside them.
    pub compute: u64,
    /// The least it can run in if its parameters come and go while it runs, where it can do that.
    pub streamed: Option<Streamed>,
}

/// What a component needs whose parameters come and go while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streamed {
    /// Bytes of its parameters that have to be on the device at once.
    pub weights: u64,
    /// Bytes that it computes in, beside them.
    pub compute: u64,
}

/// Where one component ended up.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Seat {
    /// Which.
    pub component: Component,
    /// The device that runs it.
    pub device: Device,
    /// Where its parameters live.
    pub residence: Residence,
    /// Whether they stay there while it runs, too, and only come to the device part by part.
    pub is_streamed: bool,
    /// Bytes of its parameters on the device; the least that do where they are streamed.
    pub weights: u64,
    /// Bytes that it computes in, beside them.
    pub compute: u64,
    /// Why there.
    pub reason: String,
}

/// Decides where parameters live: diffusion first, then the text encoder, then the VAE get to stay on their device, as
/// long as each component can still run beside what stays. Others live on the host if it has `host_spare` bytes for
/// them, else on the disk. `available` says what may be taken of a device, if that is known. Where a component that does
/// not stay cannot even run with all its parameters at once, they are streamed.
///
/// What was wished for is taken as it is; whether it fits is for the caller to ask, by [`peak`].
pub fn seats(
    needs: &[Need],
    available: impl Fn(Device) -> Option<u64>,
    mut host_spare: Option<u64>,
) -> Vec<Seat> {
    let mut seats: Vec<Seat> = needs
        .iter()
        .map(|need| {
            let mut seat = Seat {
                component: need.component,
                device: need.device,
                residence: need.residence.unwrap_or(Residence::Disk),
                is_streamed: false,
                weights: need.weights,
                compute: need.compute,
                reason: match need.residence {
                    Some(_) => "as asked for".to_owned(),
                    None => String::new(),
                },
            };
            seat.stream(need);
            seat
        })
        .collect();
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|&index| needs[index].component);
    for index in order {
        let (device, weights) = (seats[index].device, needs[index].weights);
        let left = available(device);
        if needs[index].residence.is_none() {
            seats[index].residence = Residence::Device;
            seats[index].hold(&needs[index]);
            let peak = peak(&seats, device);
            if left.is_none_or(|left| peak <= left) {
                seats[index].reason = match left {
                    Some(left) => format!(
                        "stays: the most that {device} has to hold is {} of {}",
                        Bytes(peak),
                        Bytes(left)
                    ),
                    None => format!("stays: nothing is known of what {device} has left"),
                };
                continue;
            }
            let short = Bytes(peak - left.unwrap_or(peak));
            let fits_host = host_spare.is_some_and(|spare| weights <= spare);
            if fits_host && device.kind() != crate::DeviceKind::Cpu {
                host_spare = host_spare.map(|spare| spare - weights);
                seats[index].residence = Residence::Host;
                seats[index].reason = format!("comes and goes: {device} lacks {short} to keep it");
            } else {
                seats[index].residence = Residence::Disk;
                seats[index].reason =
                    format!("is loaded for each use: {device} lacks {short} to keep it");
            }
        }
        // Those that come later have to leave it that much.
        seats[index].hold(&needs[index]);
        let peak = peak(&seats, device);
        if let Some(left) = left.filter(|left| peak > *left) {
            seats[index].stream(&needs[index]);
            if seats[index].is_streamed {
                let short = Bytes(peak - left);
                seats[index].reason +=
                    &format!("; streams while it runs: {device} lacks {short} to hold it whole");
            }
        }
    }
    seats
}

impl Seat {
    /// Plans for all parameters at once.
    fn hold(&mut self, need: &Need) {
        self.is_streamed = false;
        (self.weights, self.compute) = (need.weights, need.compute);
    }

    /// Plans for parameters that come and go while it runs, if they can, may, and need less then.
    fn stream(&mut self, need: &Need) {
        let Some(streamed) = need.streamed else {
            return;
        };
        let is_less = streamed.weights + streamed.compute < need.weights + need.compute;
        if is_less && self.residence != Residence::Device {
            self.is_streamed = true;
            (self.weights, self.compute) = (streamed.weights, streamed.compute);
        }
    }
}

/// The most bytes that `device` has to hold at once: everything that stays there, and the component on it that needs
/// most while it runs.
pub fn peak(seats: &[Seat], device: Device) -> u64 {
    let here = || seats.iter().filter(|seat| seat.device == device);
    let stays = |seat: &&Seat| seat.residence == Residence::Device;
    let resident: u64 = here().filter(stays).map(|seat| seat.weights).sum();
    let running = here()
        .map(|seat| seat.compute + if stays(&seat) { 0 } else { seat.weights })
        .max()
        .unwrap_or(0);
    resident + running
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_say_where_things_go() {
        let placement: Placement = "diffusion=cuda0, VAE = cpu@disk,text-encoder=@host"
            .parse()
            .unwrap();
        let of = |component| {
            let Wish { device, residence } = placement.of(component).clone();
            (device, residence)
        };
        assert_eq!(of(Component::Diffusion), (Some("cuda0".into()), None));
        assert_eq!(
            of(Component::Vae),
            (Some("cpu".into()), Some(Residence::Disk))
        );
        assert_eq!(of(Component::TextEncoder), (None, Some(Residence::Host)));

        let all: Placement = "rpc://127.0.0.1:50052@device".parse().unwrap();
        for component in Component::ALL {
            let Wish { device, residence } = all.of(component);
            assert_eq!(device, &Some("rpc://127.0.0.1:50052".into()));
            assert_eq!(*residence, Some(Residence::Device));
        }
        let typed = Placement::default()
            .device(Component::Vae, "cpu")
            .residence(Component::Vae, Residence::Disk)
            .or_device(&"cuda0".into());
        assert_eq!(
            typed,
            "cuda0"
                .parse::<Placement>()
                .unwrap()
                .device(Component::Vae, "cpu")
                .residence(Component::Vae, Residence::Disk)
        );
        for (text, reason) in [
            ("", "missing"),
            ("vae=", "missing"),
            ("unet=cpu", "the components are"),
            ("vae=cpu,cuda0", "form"),
            ("vae=cpu,vae=cuda0", "twice"),
            ("vae=cpu@ram", "live"),
            ("cpu@", "live"),
        ] {
            let error = text.parse::<Placement>().unwrap_err().to_string();
            assert!(error.contains(reason), "`{text}`: {error}");
        }
    }

    fn needs(device: Device, residences: [Option<Residence>; 3]) -> Vec<Need> {
        // In the order in which they run.
        [
            (Component::TextEncoder, 40, 5, residences[1]),
            (Component::Diffusion, 100, 20, residences[0]),
            (Component::Vae, 10, 60, residences[2]),
        ]
        .into_iter()
        .map(|(component, weights, compute, residence)| Need {
            component,
            device,
            residence,
            weights,
            compute,
            streamed: None,
        })
        .collect()
    }

    #[test]
    fn diffusion_is_served_first_and_everything_can_run() {
        use Residence::{Device as Stays, Disk};
        let cpu = Device::cpu().unwrap();
        // Residences of diffusion, text encoder and VAE, and the peak.
        for (left, expected, most) in [
            (Some(210), [Stays, Stays, Stays], 210),
            (None, [Stays, Stays, Stays], 210),
            // The VAE needs 60 beside what stays.
            (Some(209), [Stays, Disk, Stays], 170),
            (Some(170), [Stays, Disk, Stays], 170),
            // With diffusion resident it would be 100 and the VAE's 70.
            (Some(169), [Disk, Stays, Disk], 160),
            (Some(120), [Disk, Disk, Disk], 120),
            (Some(5), [Disk, Disk, Disk], 120),
        ] {
            let seats = seats(&needs(cpu, [None; 3]), |_| left, None);
            let found = Component::ALL.map(|component| {
                seats
                    .iter()
                    .find(|seat| seat.component == component)
                    .unwrap()
                    .residence
            });
            let found_peak = peak(&seats, cpu);
            assert!(seats.iter().all(|seat| !seat.reason.is_empty()));
            assert_eq!((found, found_peak), (expected, most), "{left:?}");
        }
    }

    #[test]
    fn what_does_not_even_fit_alone_is_streamed() {
        let cpu = Device::cpu().unwrap();
        let mut needs = needs(cpu, [None; 3]);
        needs[0].streamed = Some(Streamed {
            weights: 8,
            compute: 6,
        });
        needs[1].streamed = Some(Streamed {
            weights: 10,
            compute: 25,
        });
        // Residences and streaming of diffusion and text encoder, and the peak.
        let (stays, loaded, streamed) = (
            (Residence::Device, false),
            (Residence::Disk, false),
            (Residence::Disk, true),
        );
        for (left, expected, most) in [
            (210, [stays, stays], 210),
            // The VAE needs 60 and its weights beside diffusion.
            (170, [stays, loaded], 170),
            // Alone, diffusion needs 120.
            (121, [loaded, loaded], 120),
            (119, [streamed, stays], 110),
            (75, [streamed, loaded], 70),
            (70, [streamed, loaded], 70),
            // The VAE does not stream.
            (10, [streamed, streamed], 70),
        ] {
            let seats = seats(&needs, |_| Some(left), None);
            let found =
                [1, 0].map(|index: usize| (seats[index].residence, seats[index].is_streamed));
            assert_eq!((found, peak(&seats, cpu)), (expected, most), "{left}");
        }
        // Weights that are to stay are not streamed.
        needs[1].residence = Some(Residence::Device);
        assert!(!seats(&needs, |_| Some(10), None)[1].is_streamed);
    }

    #[test]
    fn wishes_are_taken_as_they_are() {
        let cpu = Device::cpu().unwrap();
        let wanted = [
            Some(Residence::Disk),
            Some(Residence::Device),
            Some(Residence::Host),
        ];
        let seats = seats(&needs(cpu, wanted), |_| Some(0), Some(1000));
        let found: Vec<_> = seats.iter().map(|seat| Some(seat.residence)).collect();
        assert_eq!(found, [wanted[1], wanted[0], wanted[2]]);
        // 40 stay; diffusion needs 120 while it runs.
        assert_eq!(peak(&seats, cpu), 160);
    }
}
