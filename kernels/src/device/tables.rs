//! The structures that launches pass to the GPU kernels, with the layout of `cuda/table.cuh`, `forward.cuh`, `backward.cuh` and
//! `rows.cuh`.
//!
//! In and out: plain numbers and device addresses, copied to the GPU as they lie. Nothing here checks or computes.
//!
//! Invariant: size and place of every field are those of the C++ side; `tests/device.rs` compares both compilers' numbers.

// `Plain` is a promise to the GPU.
#![allow(unsafe_code)]

/// A value whose bytes the GPU reads directly.
///
/// # Safety
///
/// The type is `repr(C)` or primitive, has no padding that is read, and any bytes that the GPU writes are a value of it.
pub unsafe trait Plain: Copy + Default + 'static {}

/// Declares a `repr(C)` struct of `Plain` fields, and a function that returns its layout.
macro_rules! table {
    ($(#[$meta:meta])* $name:ident { $($(#[$of:meta])* $field:ident: $kind:ty,)+ }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
        pub(crate) struct $name { $($(#[$of])* pub(crate) $field: $kind,)+ }

        // SAFETY: repr(C), all fields are integers.
        unsafe impl Plain for $name {}

        impl $name {
            /// Name, size, and the places of the fields in bytes.
            pub(crate) fn layout() -> (&'static str, usize, Vec<usize>) {
                let places = vec![$(std::mem::offset_of!($name, $field),)+];
                (stringify!($name), size_of::<$name>(), places)
            }
        }
    };
}

/// A device address; 0 is none.
pub(crate) type Address = u64;

/// The bits of an f32. As integers, parameters can be compared.
pub(crate) type Float = u32;

table! {
    /// How a kernel is launched, from the constant `NAME_launch` of its cubin.
    Launch { threads: i32, shared_bytes: i32, rows: i32, keys: i32, }
}
table! {
    /// Query rows of one document and the keys held for them; row q keeps keys from q − left to q + right.
    Task {
        q_row: i32, q_rows: i32, q_offset: i32,
        kv_row: i32, kv_rows: i32, kv_offset: i32,
        left: i32, right: i32, bundle: i32, dq_tile: i32,
    }
}
table! {
    /// Backward: consecutive tasks and the keys of all of them.
    Bundle {
        kv_row: i32, kv_rows: i32, kv_offset: i32, first_task: i32, tasks: i32, dkv_row: i32,
        first_key_tile: i32,
    }
}
table! {
    /// One unit of a forward launch.
    ForwardTile { task: i32, q_tile: i32, head: i32, segment: i32, slot: i32, }
}
table! {
    /// One unit of `merge`.
    MergeTile { task: i32, q_tile: i32, head: i32, first_slot: i32, slots: i32, }
}
table! {
    /// One unit of a backward launch.
    BackwardTile { bundle: i32, key_tile: i32, kv_head: i32, }
}
table! {
    /// One unit of `finish_dq`.
    QueryTile { task: i32, q_tile: i32, }
}
table! {
    /// What a portable kernel gets of Q, K, V or dO in place of a tensor map.
    Tensor { data: Address, heads: i32, dim: i32, }
}
table! {
    /// Argument of `cadre_forward_D` and `cadre_forward_D_softcap`.
    ForwardParameters {
        tasks: Address, tiles: Address, tile_count: i32, next: Address, heads: i32, group: i32,
        segment_rows: i32, scale_log2: Float, o: Address, lse: Address, part_o: Address,
        part_lse: Address, inner_scale: Float,
    }
}
table! {
    /// Argument of `cadre_merge`.
    MergeParameters {
        tasks: Address, tiles: Address, tile_count: i32, heads: i32, dim: i32, part_o: Address,
        part_lse: Address, o: Address, lse: Address,
    }
}
table! {
    /// Argument of `cadre_backward_D` and `cadre_backward_D_softcap`.
    BackwardParameters {
        tasks: Address, bundles: Address, tiles: Address, tile_count: i32, next: Address,
        turns: Address, heads: i32, group: i32, kv_heads: i32, scale: Float, scale_log2: Float,
        inner_scale: Float, lse: Address, delta: Address, dq: Address, dk: Address, dv: Address,
    }
}
table! {
    /// Argument of `cadre_sink`.
    SinkParameters {
        tasks: Address, tiles: Address, tile_count: i32, heads: i32, dim: i32, sinks: Address,
        o: Address, lse: Address,
    }
}
table! {
    /// Argument of `cadre_finish_dq`; one of `dq` and `dq_bf16` is 0.
    FinishParameters {
        tasks: Address, tiles: Address, tile_count: i32, heads: i32, dim: i32, scale: Float,
        sums: Address, dq: Address, dq_bf16: Address,
    }
}
table! {
    /// One unit of `copy_rows`; lengths and distances in words.
    CopyUnit {
        from: Address, to: Address, rows: i32, words: i32, from_stride: i32, to_stride: i32,
    }
}
table! {
    /// Argument of `cadre_copy_rows_16` and `cadre_copy_rows_4`.
    Copy16Parameters { copies: Address, copy_count: i32, }
}

// SAFETY: primitives.
unsafe impl Plain for u8 {}
// SAFETY: primitives.
unsafe impl Plain for u32 {}
// SAFETY: primitives.
unsafe impl Plain for i32 {}
// SAFETY: primitives; any bits are an f32.
unsafe impl Plain for f32 {}
// SAFETY: 16 bits, any of which are a bf16.
unsafe impl Plain for half::bf16 {}

/// Layouts of all tables, one line each: name, size, places of the fields; for the test that compares them with C++'s.
#[must_use]
pub fn layouts() -> String {
    let all = [
        Launch::layout(),
        Task::layout(),
        Bundle::layout(),
        ForwardTile::layout(),
        MergeTile::layout(),
        BackwardTile::layout(),
        QueryTile::layout(),
        Tensor::layout(),
        ForwardParameters::layout(),
        MergeParameters::layout(),
        BackwardParameters::layout(),
        SinkParameters::layout(),
        FinishParameters::layout(),
        CopyUnit::layout(),
        Copy16Parameters::layout(),
    ];
    let line = |(name, size, places): (&str, usize, Vec<usize>)| {
        let places: Vec<String> = places.iter().map(ToString::to_string).collect();
        format!("{name} {size} {}\n", places.join(" "))
    };
    all.into_iter().map(line).collect()
}
