//! The GPU kernels inside this binary.
//!
//! Out: the kernels that `make kernels` had built when this crate was compiled, or none. They are cubins for `sm_90a`, and
//! portable kernels as PTX for `compute_80` with cubins for `sm_80`. The head comments of `kernels/cuda` describe the kernels and
//! their launch. The launch dimensions are the constants `NAME_launch` in the cubin itself. Their symbols are local, so the
//! driver does not find them and they are read from the file.
//!
//! Nothing here loads or launches. Invariant: either all cubins are here or none, and they are built from the sources of this
//! build.

/// One compiled file of kernels.
#[derive(Clone, Copy, Debug)]
pub struct Cubin {
    /// `forward`, `backward` or `rows`.
    pub name: &'static str,
    /// An ELF file for `cuModuleLoadData`.
    pub bytes: &'static [u8],
}

/// A file of the portable kernels.
#[derive(Clone, Copy, Debug)]
pub struct PortableKernels {
    /// Machine code of `sm_80`, which GPUs of 8.6 and 8.9 run too. Its launch constants hold for every GPU.
    pub cubin: Cubin,
    /// A fatbin of PTX, which the driver compiles for other GPUs.
    pub ptx: &'static [u8],
}

/// The kernels for Hopper; empty in a build without GPU kernels.
pub const CUBINS: &[Cubin] = include!(concat!(env!("OUT_DIR"), "/cubins.rs"));
/// The kernels for any GPU from `sm_80` on; empty in a build without GPU kernels.
pub const PORTABLE: &[PortableKernels] = include!(concat!(env!("OUT_DIR"), "/portable.rs"));

impl Cubin {
    /// Reads the constant `name`, an array of `N` words, from the file; none if it is missing or
    /// has another size.
    ///
    /// The file is 64-bit little-endian ELF. The section headers begin at the offset that byte 40
    /// holds; their size and number are in bytes 58 and 60.
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

    /// Whether this build has kernels; prints that it has none.
    fn are_embedded() -> bool {
        if CUBINS.is_empty() {
            eprintln!("skipped: this build has no GPU kernels; `make kernels` builds them");
        }
        !CUBINS.is_empty()
    }

    /// A file with the constant `it_launch` of these words: header, three sections, names, words, one symbol.
    fn file_with(words: [i32; 4]) -> Vec<u8> {
        let (sections, names, constants, symbols) = (64_usize, 256_u64, 272_u64, 296_u64);
        let (symbols_at, names_at, constants_at) = (sections, sections + 64, sections + 128);
        let mut file = vec![0; 320];
        let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
        put(40, &(sections as u64).to_le_bytes());
        put(58, &64_u16.to_le_bytes());
        put(60, &3_u16.to_le_bytes());
        put(symbols_at + 4, &2_u32.to_le_bytes());
        put(symbols_at + 24, &symbols.to_le_bytes());
        put(symbols_at + 32, &24_u64.to_le_bytes());
        put(symbols_at + 40, &1_u32.to_le_bytes());
        put(names_at + 24, &names.to_le_bytes());
        put(constants_at + 24, &constants.to_le_bytes());
        put(names as usize, b"\0it_launch\0");
        for (index, word) in words.into_iter().enumerate() {
            put(constants as usize + 4 + 4 * index, &word.to_le_bytes());
        }
        let symbol = symbols as usize;
        put(symbol, &1_u32.to_le_bytes());
        put(symbol + 6, &2_u16.to_le_bytes());
        put(symbol + 8, &4_u64.to_le_bytes());
        put(symbol + 16, &16_u64.to_le_bytes());
        file
    }

    #[test]
    fn a_constant_is_read_whole_by_its_name_or_not_at_all() {
        let file: &'static [u8] = file_with([384, 1 << 17, 64, 128]).leak();
        let whole = Cubin { name: "it", bytes: file };
        assert_eq!(whole.constant("it_launch"), Some([384, 1 << 17, 64, 128]));
        assert_eq!(whole.constant::<4>("it"), None, "a part of a name is no name");
        assert_eq!(whole.constant::<3>("it_launch"), None);
        for cut in 0..file.len() {
            let part = Cubin { name: "it", bytes: &file[..cut] };
            assert_eq!(part.constant::<4>("it_launch"), None, "{cut} bytes");
        }
    }

    #[test]
    fn embedded_kernels_are_elf_files_with_their_entry_points() {
        if !are_embedded() {
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
    fn launches_are_read_from_the_embedded_files_and_nothing_else_is() {
        if !are_embedded() {
            return;
        }
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

    #[test]
    fn the_portable_kernels_are_ptx_and_fit_a_block_of_any_gpu() {
        if !are_embedded() {
            return;
        }
        for PortableKernels { cubin, ptx } in PORTABLE {
            assert!(ptx.starts_with(&[0x50, 0xED, 0x55, 0xBA]), "{} is no fatbin", cubin.name);
            for dim in [64, 128, 256] {
                let name = format!("cadre_portable_{}_{dim}", cubin.name);
                let Some([threads, shared, rows, keys]) = cubin.constant(&format!("{name}_launch"))
                else {
                    assert_eq!(cubin.name, "rows", "{name} is not there");
                    continue;
                };
                assert!(threads == 128 || threads == 256, "{name}: {threads}");
                // 99 KiB: what a block of sm_86, sm_89 and sm_120 can have.
                assert!(shared <= 99 << 10, "{name}: {shared}");
                assert!(rows % 64 == 0 && keys % 32 == 0, "{name}: {rows} rows, {keys} keys");
            }
        }
    }
}
