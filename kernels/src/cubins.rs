//! The GPU kernels inside this binary.
//!
//! Out: the cubins that `make kernels` had built before this crate was, for `sm_90a`; none otherwise. Which kernels they hold,
//! and how they are launched, is said by the head comments of `kernels/cuda`; the numbers of a launch are the constants
//! `NAME_launch` in the cubin itself. Their symbols are local, so a driver does not find them: they are read from the file.
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

impl Cubin {
    /// The numbers of the constant `name`, of `N` words; none if the file does not have it whole.
    ///
    /// The file is ELF, 64 bits, little-endian: section headers at the offset in byte 40, as many as bytes 58 and 60 say.
    pub(crate) fn constant<const N: usize>(&self, name: &str) -> Option<[i32; N]> {
        const SYMBOLS: u32 = 2;
        let number = |at: usize, bytes: usize| -> Option<usize> {
            let field = self.bytes.get(at..at.checked_add(bytes)?)?;
            let value = field.iter().rev().fold(0_u64, |all, it| all << 8 | u64::from(*it));
            usize::try_from(value).ok()
        };
        let (headers, size, count) = (number(40, 8)?, number(58, 2)?, number(60, 2)?);
        let section = |index: usize| headers.checked_add(index.checked_mul(size)?);
        let offset_of = |index: usize| number(section(index)? + 24, 8);
        for index in 0..count {
            let at = section(index)?;
            if number(at + 4, 4)? != SYMBOLS as usize {
                continue;
            }
            let (first, bytes, names) =
                (offset_of(index)?, number(at + 32, 8)?, number(at + 40, 4)?);
            for entry in (first..first.checked_add(bytes)?).step_by(24) {
                let text = self.bytes.get(offset_of(names)? + number(entry, 4)?..)?;
                if !text.strip_prefix(name.as_bytes()).is_some_and(|it| it.starts_with(&[0])) {
                    continue;
                }
                let value = offset_of(number(entry + 6, 2)?)? + number(entry + 8, 8)?;
                let mut words = [0; N];
                for (index, word) in words.iter_mut().enumerate() {
                    *word = number(value + 4 * index, 4)? as i32;
                }
                return (number(entry + 16, 8)? == 4 * N).then_some(words);
            }
        }
        None
    }
}

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

    #[test]
    fn launches_are_read_from_the_files_and_nothing_else_is() {
        for cubin in CUBINS {
            let name = match cubin.name {
                "forward" => "cadre_forward_128",
                "backward" => "cadre_backward_128",
                _ => "cadre_merge",
            };
            let [threads, shared, rows, keys] =
                cubin.constant(&format!("{name}_launch")).expect("every kernel has one");
            assert_eq!(threads, if cubin.name == "rows" { 256 } else { 384 });
            assert!((0..=227 << 10).contains(&shared), "{name} {shared}");
            assert!(cubin.name == "rows" || (rows % 64 == 0 && keys == 128), "{name}");
            assert_eq!(cubin.constant::<4>(name), None, "an entry point is no constant");
            assert_eq!(cubin.constant::<3>(&format!("{name}_launch")), None);
            for cut in [0, 50, 64, cubin.bytes.len() / 2] {
                let part = Cubin { name: cubin.name, bytes: &cubin.bytes[..cut] };
                assert_eq!(part.constant::<4>(&format!("{name}_launch")), None);
            }
        }
    }
}
