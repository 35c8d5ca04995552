//! The two families of GPU kernels: those for Hopper, and the portable ones.
//!
//! In: the GPU's compute capability, and the environment's wish. Out: a [`Family`]; which head dims it takes, and what its
//! entry points are called.
//!
//! It asks no driver. Invariant: a GPU has one family as long as a process lives, so its bits are those of one id.

use super::error::Error;

/// Environment variable that demands a family, to compare them: `portable`, or `hopper` where the GPU can run it.
pub const FAMILY_VARIABLE: &str = "CADRE_GPU_KERNELS";

/// A set of kernels. The families compute the same functions with other instructions and tiles, and so with other bits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Family {
    /// `kernels/cuda`: machine code of `sm_90a`, head dims 64, 128 and 256.
    Hopper,
    /// `kernels/cuda/portable`: any GPU from `sm_80` on, head dims that are a multiple of 8 up to 256.
    Portable,
}

/// Whether a GPU of this compute capability runs the machine code for 8.0: later ones of that generation do, except automotive
/// ones (8.7). For other GPUs the driver compiles the kernels.
pub(crate) fn runs_machine_code(capability: (i32, i32)) -> bool {
    matches!(capability, (8, 0 | 6 | 9))
}

/// Release of the driver's PTX compiler, from its kernel module. Empty where it is unknown.
pub(crate) fn compiler() -> String {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    release(&text).to_owned()
}

fn release(text: &str) -> &str {
    let is_release = |it: &&str| it.starts_with(|it: char| it.is_ascii_digit()) && it.contains('.');
    text.split_whitespace().find(is_release).unwrap_or_default()
}

impl Family {
    /// The family of a GPU with this name and compute capability; `asked` is what the environment names.
    ///
    /// # Errors
    ///
    /// A GPU that is too old, or one that cannot run what is asked for.
    pub(super) fn of(
        name: &str,
        (major, minor): (i32, i32),
        asked: Option<&str>,
    ) -> Result<Self, Error> {
        let own = match (major, minor) {
            (9, 0) => Self::Hopper,
            (8.., _) => Self::Portable,
            _ => return Err(Error::Generation { name: name.to_owned(), major, minor }),
        };
        match (asked, own) {
            (None | Some(""), own) => Ok(own),
            (Some("portable"), _) => Ok(Self::Portable),
            (Some("hopper"), Self::Hopper) => Ok(own),
            (Some(asked), _) => {
                let (asked, name) = (asked.to_owned(), name.to_owned());
                Err(Error::Family { asked, name, major, minor })
            }
        }
    }

    /// Whether the family has kernels for this head dim.
    pub fn takes_head_dim(self, dim: usize) -> bool {
        match self {
            Self::Hopper => crate::is_gpu_head_dim(dim),
            Self::Portable => crate::is_head_dim(dim),
        }
    }

    /// Entry points of the forward kernel for dims up to 64, 128 and 256, without and with a softcap.
    pub(super) fn forward(self) -> [[&'static str; 3]; 2] {
        match self {
            Self::Hopper => [
                ["cadre_forward_64", "cadre_forward_128", "cadre_forward_256"],
                [
                    "cadre_forward_64_softcap",
                    "cadre_forward_128_softcap",
                    "cadre_forward_256_softcap",
                ],
            ],
            Self::Portable => [
                [
                    "cadre_portable_forward_64",
                    "cadre_portable_forward_128",
                    "cadre_portable_forward_256",
                ],
                [
                    "cadre_portable_forward_64_softcap",
                    "cadre_portable_forward_128_softcap",
                    "cadre_portable_forward_256_softcap",
                ],
            ],
        }
    }

    /// Names of the backward kernels, in the same order.
    pub(super) fn backward(self) -> [[&'static str; 3]; 2] {
        match self {
            Self::Hopper => [
                ["cadre_backward_64", "cadre_backward_128", "cadre_backward_256"],
                [
                    "cadre_backward_64_softcap",
                    "cadre_backward_128_softcap",
                    "cadre_backward_256_softcap",
                ],
            ],
            Self::Portable => [
                [
                    "cadre_portable_backward_64",
                    "cadre_portable_backward_128",
                    "cadre_portable_backward_256",
                ],
                [
                    "cadre_portable_backward_64_softcap",
                    "cadre_portable_backward_128_softcap",
                    "cadre_portable_backward_256_softcap",
                ],
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_runs_where_it_is_for_and_the_driver_that_compiles_is_named() {
        let of = |minor| runs_machine_code((8, minor));
        assert_eq!([of(0), of(6), of(7), of(8), of(9)], [true, true, false, false, true]);
        assert!(!runs_machine_code((9, 0)) && !runs_machine_code((12, 0)));
        let said = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12.3";
        assert_eq!(release(said), "580.65.06");
        assert_eq!(release(""), "");
    }

    #[test]
    fn a_gpu_runs_the_kernels_of_its_generation_unless_others_are_asked_for() {
        let of = |capability, asked| Family::of("it", capability, asked).ok();
        for capability in
            [(8, 0), (8, 6), (8, 7), (8, 9), (9, 1), (10, 0), (10, 3), (12, 0), (12, 1)]
        {
            for asked in [None, Some(""), Some("portable")] {
                assert_eq!(of(capability, asked), Some(Family::Portable), "{capability:?}");
            }
            assert_eq!(of(capability, Some("hopper")), None, "{capability:?}");
        }
        for asked in [None, Some(""), Some("hopper")] {
            assert_eq!(of((9, 0), asked), Some(Family::Hopper));
        }
        assert_eq!(of((9, 0), Some("portable")), Some(Family::Portable));
        let wrong =
            Family::of("it", (9, 0), Some("ampere")).expect_err("there are none").to_string();
        assert!(wrong.contains("CADRE_GPU_KERNELS") && wrong.contains("\"ampere\""), "{wrong}");
        let old = Family::of("it", (7, 5), Some("portable")).expect_err("too old").to_string();
        assert!(old.contains("7.5") && old.contains("--engine cpu"), "{old}");
    }

    #[test]
    fn head_dims_are_those_that_a_family_has_kernels_for() {
        for dim in [64, 128, 256] {
            assert!(Family::Hopper.takes_head_dim(dim) && Family::Portable.takes_head_dim(dim));
        }
        for dim in [8, 80, 96, 112, 192, 248] {
            assert!(!Family::Hopper.takes_head_dim(dim) && Family::Portable.takes_head_dim(dim));
        }
        for dim in [0, 4, 65, 264] {
            assert!(!Family::Hopper.takes_head_dim(dim) && !Family::Portable.takes_head_dim(dim));
        }
    }
}
