//! Turns: which nano-batches of a step go through which layers, in which order and direction.
//!
//! In: a list of turns, announced by every rank. Out: [`Turns`], of which [`crate::phases::PhaseOrder`] makes the order of
//! phases. They are written `F0,1 B0,1` (all forward, then all backward) or `F0 B0 F1 B1` (gradients are accumulated), with
//! the layers in brackets where they are not all: `F0 B0[2,3]`.
//!
//! It knows neither rows nor plans, and not how many layers there are.
//!
//! Invariant: each nano-batch from 0 on goes forward once, and backward once behind that, or never.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU16;

use cadre_planner::Direction;
use serde::{Deserialize, Serialize};

/// Turns that are written out in an error, and numbers of each of their lists.
const MAX_WRITTEN_TURNS: usize = 16;

/// See the module.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(try_from = "Vec<Turn>", into = "Vec<Turn>")]
pub struct Turns {
    all: Vec<Turn>,
    nanos: u16,
}

/// Some nano-batches through some layers: layer by layer, forward upwards, backward downwards, and in each layer one nano-batch
/// after the other. So one computes while another one travels.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Turn {
    /// Which way.
    pub direction: Direction,
    /// Nano-batches in the order in which they come in each layer.
    pub nanos: Vec<u16>,
    /// Layers in which the phases come.
    pub layers: Which,
}

/// Layers of a turn.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Which {
    /// Every layer with core attention.
    All,
    /// The layers with these numbers, in ascending order, and not all of them.
    Only(Vec<u16>),
}

/// Why a step has no order of phases.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Error {
    /// Not one.
    #[error("there is no turn; give the step at least one")]
    None,
    /// A turn without nano-batches.
    #[error("turn {turn} has no nano-batch; name at least one, or leave the turn out")]
    NoNano {
        /// Counts from 0.
        turn: usize,
    },
    /// A turn without layers.
    #[error("turn {turn} has no layer; name at least one, or leave the turn out")]
    NoLayer {
        /// Counts from 0.
        turn: usize,
    },
    /// Layers that are not listed in their order.
    #[error(
        "turn {turn} lists layer {layer} out of order; list layers in ascending order, each once"
    )]
    Listed {
        /// Counts from 0.
        turn: usize,
        /// The layer.
        layer: u16,
    },
    /// Every layer in a list, which would be another way to say the same.
    #[error(
        "turn {turn} lists each of the {layers} layers with core attention; say that it takes all layers, without a list"
    )]
    All {
        /// Counts from 0.
        turn: usize,
        /// How many there are.
        layers: u16,
    },
    /// A layer that the model does not have.
    #[error(
        "turn {turn} lists layer {layer}, and there are {layers} with core attention; list those alone"
    )]
    NoSuchLayer {
        /// Counts from 0.
        turn: usize,
        /// The layer.
        layer: u16,
        /// How many there are.
        layers: u16,
    },
    /// A nano-batch that goes the same way again.
    #[error("turns {first} and {again} both take nano-batch {nano} {}; take it once", word(*direction))]
    Twice {
        /// The nano-batch.
        nano: u16,
        /// Which way.
        direction: Direction,
        /// Counts from 0.
        first: usize,
        /// The later turn, or the same.
        again: usize,
    },
    /// A backward that has no forward before it.
    #[error(
        "turn {turn} takes nano-batch {nano} backward before it went forward; put its forward turn first"
    )]
    BackwardFirst {
        /// Counts from 0.
        turn: usize,
        /// The nano-batch.
        nano: u16,
    },
    /// A backward through a layer that the forward left out.
    #[error(
        "turn {turn} takes nano-batch {nano} backward through layer {layer}, which it did not go forward through; name that layer in both turns"
    )]
    NotForward {
        /// Counts from 0.
        turn: usize,
        /// The nano-batch.
        nano: u16,
        /// The layer.
        layer: u16,
    },
    /// A nano-batch that no turn names.
    #[error("no turn takes nano-batch {nano}; number nano-batches from 0 without a gap")]
    Missing {
        /// The nano-batch.
        nano: u16,
    },
    /// Other nano-batches than the ranks hold.
    #[error(
        "turns take {turns} nano-batches, and ranks announced the rows of {held}; announce those of every nano-batch"
    )]
    Nanos {
        /// In turns.
        turns: u16,
        /// In lengths.
        held: usize,
    },
    /// More than can be numbered.
    #[error(
        "turns have more than {} nano-batches or {} phases; make nano-batches longer",
        u16::MAX,
        u32::MAX
    )]
    TooMany,
}

impl Turns {
    /// Takes them in their order.
    ///
    /// # Errors
    ///
    /// [`Error`], but for what depends on the layers.
    pub fn new(all: Vec<Turn>) -> Result<Self, Error> {
        // By nano-batch: the turn that takes it forward, and the one that takes it backward.
        let mut taken: BTreeMap<u16, [Option<usize>; 2]> = BTreeMap::new();
        for (turn, Turn { direction, nanos, layers }) in all.iter().enumerate() {
            match layers {
                Which::All => {}
                Which::Only(none) if none.is_empty() => return Err(Error::NoLayer { turn }),
                Which::Only(some) => {
                    if let Some(two) = some.windows(2).find(|two| two[0] >= two[1]) {
                        return Err(Error::Listed { turn, layer: two[1] });
                    }
                }
            }
            if nanos.is_empty() {
                return Err(Error::NoNano { turn });
            }
            for &nano in nanos {
                let [forward, backward] = taken.entry(nano).or_default();
                let own = match direction {
                    Direction::Forward => forward,
                    Direction::Backward if forward.is_none() => {
                        return Err(Error::BackwardFirst { turn, nano });
                    }
                    Direction::Backward => backward,
                };
                if let Some(first) = own.replace(turn) {
                    return Err(Error::Twice { nano, direction: *direction, first, again: turn });
                }
            }
        }
        let mut numbered = (0..=u16::MAX).zip(taken.keys());
        if let Some((nano, _)) = numbered.find(|(it, nano)| it != *nano) {
            return Err(Error::Missing { nano });
        }
        match u16::try_from(taken.len()) {
            Ok(0) => Err(Error::None),
            Ok(nanos) => Ok(Self { all, nanos }),
            Err(_) => Err(Error::TooMany),
        }
    }

    /// `F0,1 B0,1`: all nano-batches forward, then all of them backward.
    pub fn together(nanos: NonZeroU16) -> Self {
        Self { all: both(0..nanos.get()).into(), nanos: nanos.get() }
    }

    /// `F0 B0 F1 B1`: `times` times, one after the other, the next `nanos` nano-batches forward and backward. Whoever sums
    /// gradients so has to keep those nano-batches alone.
    ///
    /// # Errors
    ///
    /// [`Error::TooMany`] nano-batches.
    pub fn accumulated(times: NonZeroU16, nanos: NonZeroU16) -> Result<Self, Error> {
        let all = times.checked_mul(nanos).ok_or(Error::TooMany)?.get();
        let each = usize::from(nanos.get());
        let turns = (0..all).step_by(each).flat_map(|it| both(it..it + nanos.get()));
        Ok(Self { all: turns.collect(), nanos: all })
    }

    /// `F0,1`: all nano-batches forward, and none backward.
    pub fn forward(nanos: NonZeroU16) -> Self {
        let [forward, _] = both(0..nanos.get());
        Self { all: vec![forward], nanos: nanos.get() }
    }

    /// All of them, in their order.
    pub fn list(&self) -> &[Turn] {
        &self.all
    }

    /// How many nano-batches they take.
    pub fn nanos(&self) -> u16 {
        self.nanos
    }
}

/// Some nano-batches forward, then backward.
fn both(nanos: std::ops::Range<u16>) -> [Turn; 2] {
    [Direction::Forward, Direction::Backward].map(|direction| Turn {
        direction,
        nanos: nanos.clone().collect(),
        layers: Which::All,
    })
}

/// The direction in words.
pub(crate) fn word(direction: Direction) -> &'static str {
    match direction {
        Direction::Forward => "forward",
        Direction::Backward => "backward",
    }
}

impl TryFrom<Vec<Turn>> for Turns {
    type Error = Error;

    fn try_from(all: Vec<Turn>) -> Result<Self, Error> {
        Self::new(all)
    }
}

impl From<Turns> for Vec<Turn> {
    fn from(turns: Turns) -> Self {
        turns.all
    }
}

/// Written as in the module. Long lists of turns, nano-batches or layers are cut short, with the
/// number of those left out, so the text never has more than a few lines.
impl fmt::Display for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |numbers: &[u16]| {
            let written: Vec<_> =
                numbers.iter().take(MAX_WRITTEN_TURNS).map(ToString::to_string).collect();
            let more = numbers.len() - written.len();
            let more = if more > 0 { format!(",… {more} more") } else { String::new() };
            written.join(",") + &more
        };
        for (index, Turn { direction, nanos, layers }) in
            self.all.iter().enumerate().take(MAX_WRITTEN_TURNS)
        {
            let gap = if index > 0 { " " } else { "" };
            let letter = match direction {
                Direction::Forward => "F",
                Direction::Backward => "B",
            };
            write!(f, "{gap}{letter}{}", list(nanos))?;
            if let Which::Only(some) = layers {
                write!(f, "[{}]", list(some))?;
            }
        }
        match self.all.len() {
            0..=MAX_WRITTEN_TURNS => Ok(()),
            more => write!(f, " and {} more", more - MAX_WRITTEN_TURNS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(direction: Direction, nanos: &[u16], layers: Which) -> Turn {
        Turn { direction, nanos: nanos.to_vec(), layers }
    }

    fn forward(nanos: &[u16]) -> Turn {
        turn(Direction::Forward, nanos, Which::All)
    }

    fn backward(nanos: &[u16]) -> Turn {
        turn(Direction::Backward, nanos, Which::All)
    }

    #[test]
    fn turns_are_written_as_they_are_told() {
        let number = |it| NonZeroU16::new(it).unwrap();
        let check = |turns: Turns, nanos, expected: &str| {
            assert_eq!((turns.to_string().as_str(), turns.nanos()), (expected, nanos));
            assert_eq!(Turns::new(turns.list().to_vec()), Ok(turns.clone()));
            let text = serde_json::to_string(&turns).unwrap();
            assert_eq!(serde_json::from_str::<Turns>(&text).unwrap(), turns);
        };
        check(Turns::together(number(2)), 2, "F0,1 B0,1");
        check(Turns::forward(number(3)), 3, "F0,1,2");
        check(Turns::accumulated(number(2), number(1)).unwrap(), 2, "F0 B0 F1 B1");
        check(Turns::accumulated(number(2), number(2)).unwrap(), 4, "F0,1 B0,1 F2,3 B2,3");
        let many = Turns::accumulated(number(10), number(1)).unwrap();
        assert!(many.to_string().ends_with("F7 B7 and 4 more"), "{many}");
        let wide = Turns::together(NonZeroU16::MAX);
        let end = "B0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,… 65519 more";
        assert!(wide.to_string().ends_with(end), "{wide}");
        let long = |it| turn(Direction::Forward, &[it], Which::Only((50_000..u16::MAX).collect()));
        let long = Turns::new((0..100).map(long).collect()).unwrap().to_string();
        assert!(long.len() < 3_000, "{} bytes", long.len());
        let frozen = turn(Direction::Backward, &[1], Which::Only(vec![2, 3]));
        let mixed = vec![forward(&[1]), forward(&[0]), frozen, forward(&[2]), backward(&[0])];
        check(Turns::new(mixed).unwrap(), 3, "F1 F0 B1[2,3] F2 B0");
        let text = serde_json::to_string(&Turns::forward(number(1))).unwrap();
        assert_eq!(text, r#"[{"direction":"forward","nanos":[0],"layers":"all"}]"#);
    }

    #[test]
    fn turns_that_no_step_can_have_are_refused_by_name() {
        let only = |some: &[u16]| turn(Direction::Forward, &[0], Which::Only(some.to_vec()));
        for (turns, expected, words) in [
            (vec![], Error::None, "there is no turn"),
            (vec![forward(&[])], Error::NoNano { turn: 0 }, "turn 0 has no nano-batch"),
            (vec![only(&[])], Error::NoLayer { turn: 0 }, "turn 0 has no layer"),
            (vec![only(&[1, 1])], Error::Listed { turn: 0, layer: 1 }, "turn 0 lists layer 1 out"),
            (
                vec![forward(&[0, 0])],
                Error::Twice { nano: 0, direction: Direction::Forward, first: 0, again: 0 },
                "turns 0 and 0 both take nano-batch 0 forward",
            ),
            (
                vec![forward(&[0]), backward(&[0]), forward(&[1]), backward(&[1, 0])],
                Error::Twice { nano: 0, direction: Direction::Backward, first: 1, again: 3 },
                "turns 1 and 3 both take nano-batch 0 backward",
            ),
            (
                vec![forward(&[0]), backward(&[1]), forward(&[1])],
                Error::BackwardFirst { turn: 1, nano: 1 },
                "turn 1 takes nano-batch 1 backward before",
            ),
            (vec![forward(&[0, 2])], Error::Missing { nano: 1 }, "no turn takes nano-batch 1"),
        ] {
            let text = serde_json::to_string(&turns).unwrap();
            let read = serde_json::from_str::<Turns>(&text).unwrap_err().to_string();
            let refused = Turns::new(turns).unwrap_err();
            assert!(refused.to_string().starts_with(words), "{refused}");
            assert!(read.starts_with(&refused.to_string()), "{read}");
            assert_eq!(refused, expected);
        }
        let many = NonZeroU16::new(256).unwrap();
        assert_eq!(Turns::accumulated(many, many), Err(Error::TooMany));
    }
}
