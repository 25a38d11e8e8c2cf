//! The encoder's convolutions.

use sd_graph::{Scope, Tensor};

use super::config::Config;
use super::layers::{Conv, Snake, Way};

/// Samples `[n, 1, t]` to `[n, t / hop, latent_dim]`.
#[derive(Debug)]
pub(super) struct Encoder {
    conv_in: Conv,
    levels: Vec<Level>,
    snake_out: Snake,
    conv_out: Conv,
}

#[derive(Debug)]
struct Level {
    units: [Unit; 3],
    snake: Snake,
    conv: Conv,
}

#[derive(Debug)]
struct Unit {
    snake1: Snake,
    conv1: Conv,
    snake2: Snake,
    conv2: Conv,
}

impl Encoder {
    pub(super) fn new(root: &Scope<'_>, config: &Config) -> Encoder {
        let scope = root.sub("encoder.block");
        let mut dim = config.encoder_dim;
        let conv_in = Conv::new(&scope.sub(0), 1, dim, 7);
        let levels: Vec<Level> = (config.encoder_rates.iter().enumerate())
            .map(|(index, &rate)| {
                let scope = scope.sub(index + 1).sub("block");
                let level = Level {
                    units: [(0, 1), (1, 3), (2, 9)].map(|(unit, dilation)| {
                        Unit::new(&scope.sub(unit).sub("block"), dim, dilation)
                    }),
                    snake: Snake::new(&scope.sub(3), dim),
                    conv: Conv::shortening(&scope.sub(4), dim, 2 * dim, rate),
                };
                dim *= 2;
                level
            })
            .collect();
        let behind = levels.len() + 1;
        Encoder {
            conv_in,
            snake_out: Snake::new(&scope.sub(behind), dim),
            conv_out: Conv::new(&scope.sub(behind + 1), dim, config.latent_dim, 3),
            levels,
        }
    }

    pub(super) fn forward<'g>(&self, x: Tensor<'g>, way: Way) -> Tensor<'g> {
        let mut x = self.conv_in.forward(x);
        for level in &self.levels {
            for unit in &level.units {
                x = unit.forward(x, way);
            }
            x = level.conv.forward(level.snake.forward(x, way));
        }
        self.conv_out
            .forward(self.snake_out.forward(x, way))
            .permute([0, 2, 1])
    }
}

impl Unit {
    fn new(scope: &Scope<'_>, dim: usize, dilation: usize) -> Unit {
        Unit {
            snake1: Snake::new(&scope.sub(0), dim),
            conv1: Conv::dilated(&scope.sub(1), [dim, dim, 7], dilation),
            snake2: Snake::new(&scope.sub(2), dim),
            conv2: Conv::new(&scope.sub(3), dim, dim, 1),
        }
    }

    fn forward<'g>(&self, x: Tensor<'g>, way: Way) -> Tensor<'g> {
        let y = self.conv1.forward(self.snake1.forward(x, way));
        x + self.conv2.forward(self.snake2.forward(y, way))
    }
}
