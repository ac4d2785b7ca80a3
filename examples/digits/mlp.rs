//! A multi-layer perceptron with one hidden layer, its loss and its gradient.
//!
//! All parameters lie in one vector, so that a single all-reduce averages the whole gradient.

use crate::data::{CLASSES, PIXELS};
use crate::rng::Rng;

/// Units of the hidden layer.
const HIDDEN: usize = 64;
const W1: usize = PIXELS * HIDDEN;
const B1: usize = HIDDEN;
const W2: usize = HIDDEN * CLASSES;
/// Number of parameters.
pub const PARAMETERS: usize = W1 + B1 + W2 + CLASSES;

/// The network: pixels -> hidden (rectified linear) -> one score a class (softmax).
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    /// Hidden weights, hidden biases, output weights, output biases.
    pub parameters: Vec<f32>,
}

struct Layers<'a> {
    w1: &'a [f32],
    b1: &'a [f32],
    w2: &'a [f32],
    b2: &'a [f32],
}

impl Mlp {
    /// Random weights (He et al., 2015), zero biases.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let mut layer = |inputs: usize, outputs: usize| -> Vec<f32> {
            let scale = (6.0 / inputs as f32).sqrt();
            (0..inputs * outputs)
                .map(|_| rng.uniform() * scale)
                .collect()
        };
        let mut parameters = layer(PIXELS, HIDDEN);
        parameters.resize(W1 + B1, 0.0);
        parameters.extend(layer(HIDDEN, CLASSES));
        parameters.resize(PARAMETERS, 0.0);
        Self { parameters }
    }

    fn layers(&self) -> Layers<'_> {
        let (w1, rest) = self.parameters.split_at(W1);
        let (b1, rest) = rest.split_at(B1);
        let (w2, b2) = rest.split_at(W2);
        Layers { w1, b1, w2, b2 }
    }

    /// Hidden activations and class probabilities of one image.
    fn forward(&self, pixels: &[f32]) -> ([f32; HIDDEN], [f32; CLASSES]) {
        let Layers { w1, b1, w2, b2 } = self.layers();
        let mut hidden = [0.0; HIDDEN];
        hidden.copy_from_slice(b1);
        for (pixel, row) in pixels.iter().zip(w1.chunks_exact(HIDDEN)) {
            if *pixel != 0.0 {
                hidden
                    .iter_mut()
                    .zip(row)
                    .for_each(|(unit, weight)| *unit += pixel * weight);
            }
        }
        for unit in &mut hidden {
            *unit = unit.max(0.0);
        }
        let mut scores = [0.0; CLASSES];
        scores.copy_from_slice(b2);
        for (unit, row) in hidden.iter().zip(w2.chunks_exact(CLASSES)) {
            scores
                .iter_mut()
                .zip(row)
                .for_each(|(score, weight)| *score += unit * weight);
        }
        let top = scores.iter().copied().fold(f32::MIN, f32::max);
        for score in &mut scores {
            *score = (*score - top).exp();
        }
        let sum: f32 = scores.iter().sum();
        for score in &mut scores {
            *score /= sum;
        }
        (hidden, scores)
    }

    /// Cross-entropy loss of one image, and whether the class with the highest probability is right.
    pub fn test(&self, pixels: &[f32], label: u8) -> (f32, bool) {
        let (_, probabilities) = self.forward(pixels);
        let right = probabilities[usize::from(label)];
        let hit = probabilities.iter().all(|p| *p <= right);
        (-right.max(f32::MIN_POSITIVE).ln(), hit)
    }

    /// Adds the gradient of one image's loss, times `scale`, to `gradient`; gives the loss.
    pub fn add_gradient(&self, pixels: &[f32], label: u8, scale: f32, gradient: &mut [f32]) -> f32 {
        let (hidden, probabilities) = self.forward(pixels);
        let loss = -probabilities[usize::from(label)]
            .max(f32::MIN_POSITIVE)
            .ln();
        let mut scores = probabilities;
        scores[usize::from(label)] -= 1.0;
        for score in &mut scores {
            *score *= scale;
        }

        let w2 = self.layers().w2;
        let (g_w1, rest) = gradient.split_at_mut(W1);
        let (g_b1, rest) = rest.split_at_mut(B1);
        let (g_w2, g_b2) = rest.split_at_mut(W2);
        g_b2.iter_mut()
            .zip(&scores)
            .for_each(|(g, score)| *g += score);
        let mut back = [0.0; HIDDEN];
        for (unit, activation) in hidden.iter().enumerate() {
            if *activation > 0.0 {
                let weights = &w2[unit * CLASSES..][..CLASSES];
                back[unit] = weights.iter().zip(&scores).map(|(w, s)| w * s).sum();
                let row = &mut g_w2[unit * CLASSES..][..CLASSES];
                row.iter_mut()
                    .zip(&scores)
                    .for_each(|(g, score)| *g += activation * score);
            }
        }
        g_b1.iter_mut().zip(&back).for_each(|(g, b)| *g += b);
        for (pixel, row) in pixels.iter().zip(g_w1.chunks_exact_mut(HIDDEN)) {
            if *pixel != 0.0 {
                row.iter_mut().zip(&back).for_each(|(g, b)| *g += pixel * b);
            }
        }
        loss
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let mlp = Mlp::new(3);
        let mut rng = Rng::new(5);
        let pixels: Vec<f32> = (0..PIXELS).map(|_| rng.uniform().abs()).collect();
        let mut gradient = vec![0.0; PARAMETERS];
        mlp.add_gradient(&pixels, 4, 1.0, &mut gradient);
        let mut checked = 0;
        for index in (0..PARAMETERS).step_by(97) {
            let step = 1e-2;
            let loss = |change: f32| {
                let mut moved = mlp.clone();
                moved.parameters[index] += change;
                f64::from(moved.test(&pixels, 4).0)
            };
            let slope = (loss(step) - loss(-step)) / f64::from(2.0 * step);
            assert!(
                (slope - f64::from(gradient[index])).abs() < 2e-2,
                "{index}: {slope} {}",
                gradient[index]
            );
            checked += usize::from(slope.abs() > 1e-3);
        }
        assert!(checked > 5, "the check must meet parameters that matter");
    }
}
