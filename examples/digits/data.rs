//! The digit images: read, split, and dealt out to the ranks.

use std::io::Read;

use anyhow::{Context as _, ensure};
use flate2::read::GzDecoder;

use crate::rng::Rng;

/// Pixels of an image.
pub const PIXELS: usize = 64;
/// Kinds of digits.
pub const CLASSES: usize = 10;

/// The file travels inside the program, so that a worker on any node has it.
static FILE: &[u8] = include_bytes!("../data/digits.csv.gz");

/// Images with their digits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Digits {
    /// `len * PIXELS` grey values, each from 0 to 1.
    pub pixels: Vec<f32>,
    /// One digit an image.
    pub labels: Vec<u8>,
}

impl Digits {
    /// All images of the data set.
    pub fn load() -> anyhow::Result<Self> {
        let mut text = String::new();
        GzDecoder::new(FILE)
            .read_to_string(&mut text)
            .context("digits.csv.gz does not unpack")?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut digits = Self::default();
        for (number, line) in text.lines().enumerate() {
            let row: Vec<u8> = line
                .split(',')
                .map(|field| {
                    field
                        .trim()
                        .parse()
                        .with_context(|| format!("`{field}` is no number"))
                })
                .collect::<anyhow::Result<_>>()
                .with_context(|| format!("line {} of the digits", number + 1))?;
            let [pixels @ .., label] = row.as_slice() else {
                continue;
            };
            ensure!(
                pixels.len() == PIXELS
                    && pixels.iter().all(|p| *p <= 16)
                    && usize::from(*label) < CLASSES,
                "line {} of the digits: expected {PIXELS} values from 0 to 16 and a digit",
                number + 1
            );
            digits
                .pixels
                .extend(pixels.iter().map(|p| f32::from(*p) / 16.0));
            digits.labels.push(*label);
        }
        Ok(digits)
    }

    /// Number of images.
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// The image at `index`, and its digit.
    pub fn get(&self, index: usize) -> (&[f32], u8) {
        (&self.pixels[index * PIXELS..][..PIXELS], self.labels[index])
    }

    /// A fifth to test with, and the rest to train with. The seed alone decides which.
    pub fn split(&self, seed: u64) -> (Self, Self) {
        let order = Rng::new(seed).permutation(self.len());
        let (test, train) = order.split_at(self.len() / 5);
        (self.pick(train), self.pick(test))
    }

    fn pick(&self, indices: &[usize]) -> Self {
        let mut picked = Self::default();
        for &index in indices {
            let (pixels, label) = self.get(index);
            picked.pixels.extend_from_slice(pixels);
            picked.labels.push(label);
        }
        picked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_holds_1797_images_of_ten_digits() {
        let digits = Digits::load().unwrap();
        assert_eq!(digits.len(), 1797);
        assert_eq!(digits.pixels.len(), 1797 * PIXELS);
        for digit in 0..CLASSES {
            assert!(
                digits
                    .labels
                    .iter()
                    .filter(|l| usize::from(**l) == digit)
                    .count()
                    > 150
            );
        }
    }

    #[test]
    fn a_bad_row_is_named() {
        let error = Digits::parse("1,2,3\n").unwrap_err().to_string();
        assert!(error.starts_with("line 1 of the digits"), "{error}");
    }

    #[test]
    fn the_seed_decides_the_split_and_nothing_is_in_both_parts() {
        let digits = Digits::load().unwrap();
        let (train, test) = digits.split(7);
        assert_eq!((train.len(), test.len()), (1438, 359));
        assert_eq!(digits.split(7), (train, test));
        assert_ne!(digits.split(8).1, digits.split(7).1);
    }
}
