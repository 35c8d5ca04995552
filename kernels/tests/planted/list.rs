//! Bugs that people write on the host's side of the GPU kernels, and in kernels that only run behind it, each as a replacement
//! in one file.
//!
//! In: nothing. Out: the list. Every text stands exactly once in its file, so a change that removes it makes the test say so.

use crate::common::{Planted, planted};

const SINKS: &str = "sinks::sinks";
const SOFTCAP: &str = "softcap::softcap";
const PRODUCTS: &str = "linear::products";
const MEMORY: &str = "arenas::memory";
const ROOMS: &str = "arenas::rooms";
const GATES: &str = "arenas::gates";

const COPIES: &str = "rows::copies";
const PIECES: &str = "rows::pieces";

const ARENA: &str = "src/device/arena.rs";
const BLAS: &str = "src/device/blas.rs";
const LINEAR: &str = "src/device/linear.rs";
const COPIER: &str = "src/device/rows.rs";
const ROWS: &str = "cuda/rows.cuh";

/// All of them; the tests are those of `tests/emulated`.
pub(crate) const PLANTED: &[Planted] = &[
    planted(SINKS, ROWS, "all heads have the sink of the first", "p.sinks[head]", "p.sinks[0]"),
    planted(SINKS, ROWS, "O is half rescaled", "numbers.y * factor", "numbers.y"),
    planted(SINKS, ROWS, "LSE stays without its sink", "p.lse[row] = after", "p.lse[row] = before"),
    planted(
        SINKS,
        ROWS,
        "rows beside a task get sinks",
        "const size_t row = (size_t)(task.q_row + in_task) * p.heads + head;\n        const float before",
        "const size_t row = (size_t)in_task * p.heads + head;\n        const float before",
    ),
    planted(
        SINKS,
        "src/device/lists.rs",
        "only the first tile of a task is finished",
        "(0..).zip(tasks).flat_map(tiles).collect()",
        "(0..).zip(tasks).flat_map(|it| tiles(it).take(1)).collect()",
    ),
    planted(
        SINKS,
        "src/device/forward.rs",
        "sinks are given the heads' number as their dim",
        "dim: heads.dim as i32,\n            sinks",
        "dim: heads.query as i32,\n            sinks",
    ),
    planted(
        SINKS,
        "src/sink.rs",
        "the gradient of sinks has the other sign",
        "*sum -= exp(sinks[head] - lse[head]) * delta[head];",
        "*sum += exp(sinks[head] - lse[head]) * delta[head];",
    ),
    planted(
        SOFTCAP,
        "src/device/host.rs",
        "tasks with another softcap are of the same batch",
        "softcap.map(f32::to_bits))",
        "None)",
    ),
    planted(
        SOFTCAP,
        "src/device/plan.rs",
        "tanh is taken of scores that are not divided by the softcap",
        "self.scale / softcap",
        "self.scale / softcap.max(1.0)",
    ),
    planted(
        PRODUCTS,
        BLAS,
        "operands are transposed for each other",
        "(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, b)",
        "(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, a)",
    ),
    planted(PRODUCTS, BLAS, "a matrix is as wide as it is high", "columns as i64,", "rows as i64,"),
    planted(
        PRODUCTS,
        BLAS,
        "what was there is always added to",
        "Accumulate::Add { 1.0_f32 } else { 0.0 }",
        "Accumulate::Add { 1.0_f32 } else { 1.0 }",
    ),
    planted(
        PRODUCTS,
        BLAS,
        "algorithms may divide sums",
        "CUBLASLT_REDUCTION_SCHEME_NONE as u32",
        "CUBLASLT_REDUCTION_SCHEME_MASK as u32",
    ),
    planted(
        PRODUCTS,
        BLAS,
        "algorithms may use more workspace than there is",
        "(WORKSPACE * 4) as u64",
        "(WORKSPACE * 8) as u64",
    ),
    planted(
        PRODUCTS,
        LINEAR,
        "gradients of the last step stay",
        "        self.gradients.clear(&self.stream, all)?;\n",
        "        let _ = all;\n",
    ),
    planted(
        PRODUCTS,
        LINEAR,
        "weights begin where copies cannot",
        "range.len().next_multiple_of(ALIGNMENT / size_of::<f32>())",
        "range.len()",
    ),
    planted(
        PRODUCTS,
        LINEAR,
        "only the last weight has a gradient of rows",
        "accumulate = Accumulate::Add;",
        "accumulate = Accumulate::Replace;",
    ),
    planted(
        PRODUCTS,
        LINEAR,
        "gradients take the place of those that were there",
        "*to += sum;",
        "*to = *sum;",
    ),
    planted(
        MEMORY,
        ARENA,
        "a piece begins where its arena does",
        "self.arena.0.mapping.address + self.at\n",
        "self.arena.0.mapping.address\n",
    ),
    planted(
        MEMORY,
        ARENA,
        "a copy may end behind its landing",
        "        to.inside(\"a landing\", at.saturating_add(bytes))?;\n",
        "",
    ),
    planted(
        MEMORY,
        ARENA,
        "a copy may begin behind its arena",
        "if from.saturating_add(bytes) > length {",
        "if from.saturating_add(bytes) > u64::MAX - length {",
    ),
    planted(
        MEMORY,
        ARENA,
        "an arena cannot be written by its owner",
        "Mapping::new(gpu, handle, bytes, Access::ReadAndWrite)?",
        "Mapping::new(gpu, handle, bytes, Access::Read)?",
    ),
    planted(
        ROOMS,
        "src/device/rooms.rs",
        "a copy begins where the room of its rows does",
        "from: it.from + from.at,",
        "from: it.from,",
    ),
    planted(
        ROOMS,
        "src/device/rooms.rs",
        "copies to a room are not waited for",
        "self.room.copying().iter().try_for_each(|it| stream.wait_for(&it.over))",
        "self.room.copying().iter().take(0).try_for_each(|it| stream.wait_for(&it.over))",
    ),
    planted(
        ROOMS,
        "src/device/rooms.rs",
        "a room is given away while it is copied to",
        "        let _ = self.settle();\n",
        "        std::mem::forget(std::mem::take(&mut self.copying));\n",
    ),
    planted(
        ROOMS,
        "src/device/rooms.rs",
        "a copy on one stream is taken for the end of those on others",
        "copying.iter_mut().find(|it| it.over.is_of_stream_of(&over))",
        "copying.iter_mut().next()",
    ),
    planted(
        ROOMS,
        "src/device/rooms.rs",
        "a long piece gets a short arena",
        "self.arena_bytes.max(bytes)",
        "self.arena_bytes",
    ),
    planted(
        GATES,
        "src/device/gate.rs",
        "an opener that goes away has the last word",
        "let _ = word.compare_exchange(0, Gate::ABANDONED, Ordering::AcqRel, Ordering::Acquire);",
        "word.store(Gate::ABANDONED, Ordering::Release);",
    ),
    planted(
        GATES,
        "src/device/gate.rs",
        "an abandoned gate looks closed to streams",
        "i32::MAX as u32",
        "u32::MAX",
    ),
    planted(
        COPIES,
        COPIER,
        "columns of a long row all begin at its first word",
        "from: from + row * from_stride + column * word,",
        "from: from + row * from_stride,",
    ),
    planted(
        COPIES,
        COPIER,
        "distances are counted in bytes",
        "to_stride: if rows > 1 { (to_stride / word) as i32 }",
        "to_stride: if rows > 1 { to_stride as i32 }",
    ),
    planted(
        COPIES,
        COPIER,
        "what is askew by 4 bytes is copied by words of 16",
        "partition(|it| it.is_multiple_of(16))",
        "partition(|it| it.bytes.is_multiple_of(16))",
    ),
    planted(
        PIECES,
        COPIER,
        "of several lists the first is launched alone",
        "units.chunks(LIST)",
        "units.chunks(LIST).take(1)",
    ),
    planted(
        PIECES,
        "src/device/pieces.rs",
        "pieces that are side by side in the source alone are joined",
        "it.from + it.bytes == piece.from && it.to + it.bytes == piece.to",
        "it.from + it.bytes == piece.from",
    ),
    planted(
        PIECES,
        "src/device/pieces.rs",
        "a run goes on at another distance in the source",
        "(from_stride, to_stride) == (copy.from_stride, copy.to_stride)",
        "to_stride == copy.to_stride",
    ),
];
