//! The order of phases that the options of `cadre train` say, for the trainer and for who sizes its job.
//!
//! In: numbers of nano-batches, the layers of the model. Out: [`Turns`], or what is too many of them, by the names of the options.
//! What passes here the conductor takes, too.

use std::num::{NonZeroU16, NonZeroU32};

use cadre_worker::session::{Layers, PhaseOrder, TooManyPlans, Turns, TurnsError, check_plans};

/// Options that no step can have.
#[derive(Debug, thiserror::Error)]
#[error("--nano-batches {nano_batches} with --accumulate {accumulate}: {why}")]
pub struct Error {
    nano_batches: NonZeroU32,
    accumulate: NonZeroU16,
    why: Why,
}

#[derive(Debug, thiserror::Error)]
enum Why {
    #[error("{0} (--tokens)")]
    Turns(#[from] TurnsError),
    #[error("{0} (--tokens)")]
    Plans(#[from] TooManyPlans),
}

/// `nano_batches` nano-batches forward and backward, `accumulate` times.
///
/// # Errors
///
/// [`Error`]: more nano-batches, phases or plans than can be numbered.
pub fn accumulated(
    nano_batches: NonZeroU32,
    accumulate: NonZeroU16,
    layers: &Layers,
) -> Result<Turns, Error> {
    let make = || {
        let together = NonZeroU16::try_from(nano_batches).map_err(|_| TurnsError::TooMany)?;
        let turns = Turns::accumulated(accumulate, together)?;
        check_plans(turns.nanos().into(), layers)?;
        PhaseOrder::new(&turns, layers.count(), turns.nanos().into())?;
        Ok(turns)
    };
    make().map_err(|why| Error { nano_batches, accumulate, why })
}

#[cfg(test)]
mod tests {
    use cadre_worker::session::{Heads, Kind, Mask};

    use super::*;

    #[test]
    fn too_many_of_anything_is_refused_by_the_options() {
        let causal = Kind::causal(Heads { query: 2, kv: 1, dim: 8 });
        let window = |left| Kind { mask: Mask::Window { left }, ..causal };
        let kinds = |count: u32| Layers::new((0..count).map(window)).unwrap();
        let check = |nano_batches: u32, accumulate, layers: &Layers, expected: Option<&str>| {
            let (nano_batches, accumulate) =
                (NonZeroU32::new(nano_batches).unwrap(), NonZeroU16::new(accumulate).unwrap());
            let refused = accumulated(nano_batches, accumulate, layers).err();
            let refused = refused.map(|it| it.to_string());
            let options = format!("--nano-batches {nano_batches} with --accumulate {accumulate}: ");
            let expected = expected.map(|it| options + it + " (--tokens)");
            assert_eq!(refused, expected);
        };
        check(1, 32_767, &kinds(1), None);
        let plans = "40000 nano-batches and 1 kinds of layers have more than 32767 plans; make nano-batches longer and fewer";
        check(1, 40_000, &kinds(1), Some(plans));
        let plans = "16384 nano-batches and 2 kinds of layers have more than 32767 plans; make nano-batches longer and fewer";
        check(2, 8_192, &kinds(2), Some(plans));
        let many = "turns have more than 65535 nano-batches or 4294967295 phases; make nano-batches longer";
        check(70_000, 1, &kinds(1), Some(many));
        check(256, 256, &kinds(1), Some(many));
        let deep = Layers::alike(causal, u16::MAX).unwrap();
        check(1, 32_767, &deep, None);
    }
}
