//! The GPU kernels inside this binary.
//!
//! Out: the cubins that `make kernels` had built before this crate was, for `sm_90a`; none otherwise. Which kernels they hold,
//! and how they are launched, is said by the head comments of `kernels/cuda`; the numbers of a launch are the constants
//! `NAME_launch` in the cubin itself.
//!
//! Nothing here loads or launches. Invariant: all cubins or none, built from the sources of this build.

/// One compiled file of kernels.
#[derive(Clone, Copy, Debug)]
pub struct Cubin {
    /// `forward`, `backward` or `rows`.
    pub name: &'static str,
    /// An ELF file for `cuModuleLoadData`.
    pub bytes: &'static [u8],
}

/// All of them; empty in a build without GPU kernels.
pub const CUBINS: &[Cubin] = include!(concat!(env!("OUT_DIR"), "/cubins.rs"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_kernels_are_elf_files_with_their_entry_points() {
        if CUBINS.is_empty() {
            eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
            return;
        }
        let entries =
            |name| CUBINS.iter().find(|it| it.name == name).map(|it| it.bytes).unwrap_or_default();
        for (cubin, entry) in [
            ("forward", "cadre_forward_64"),
            ("forward", "cadre_forward_256"),
            ("backward", "cadre_backward_128"),
            ("rows", "cadre_merge"),
            ("rows", "cadre_finish_dq"),
        ] {
            let bytes = entries(cubin);
            assert!(bytes.starts_with(b"\x7fELF"), "{cubin} is no ELF file");
            let wanted = format!(".text.{entry}\0").into_bytes();
            assert!(bytes.windows(wanted.len()).any(|it| it == wanted), "{cubin} lacks {entry}");
        }
    }
}
