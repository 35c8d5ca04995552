//! The part of the C face that plans attention and runs it.
//!
//! In: tasks as lines, device addresses. Out: plans; launches on the caller's stream. Invariant: that of the crate.

use cadre_kernels::device::{
    BackwardBundle, BackwardPlan, BackwardTensors, ForwardPlan, ForwardTask, ForwardTensors, Gpu,
    Order, QueryGradients, Scratch, Stream,
};

use super::{Failed, LaunchShape, TaskLine, Tensor, freed, given, given_mut, guard, listed};

/// Two calls of the face that each kind of handle has: how much of the GPU's memory it takes, and its end.
macro_rules! sized_and_freed {
    ($handle:ty, $what:literal, $length:ident, $bytes:ident, $free:ident, $ends:literal) => {
        #[doc = concat!("Bytes of the GPU's memory that a ", $what, " has taken.")]
        ///
        /// # Safety
        ///
        /// `handle` comes from the call that makes such ones.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $bytes(handle: *const $handle) -> u64 {
            // SAFETY: the caller's promise.
            guard(0, || Ok(unsafe { given(handle, $what) }?.$length()))
        }

        #[doc = $ends]
        ///
        /// # Safety
        ///
        /// `handle` comes from the call that makes such ones, or is null, and is not used again.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $free(handle: *mut $handle) {
            // SAFETY: the caller's promise.
            unsafe { freed(handle) };
        }
    };
}

/// What plans share whose runs come one behind the other; null on error.
///
/// # Safety
///
/// `gpu` comes from [`crate::cadre_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_workspace(gpu: *const Gpu) -> *mut Scratch {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        Ok(Box::into_raw(Box::new(Scratch::new(unsafe { given(gpu, "gpu") }?)?)))
    })
}

sized_and_freed!(
    Scratch,
    "workspace",
    len_bytes,
    cadre_workspace_bytes,
    cadre_workspace_free,
    "Lets a workspace go; plans that were made with it keep it."
);

/// The caller's workspace, or one of the plan's own.
///
/// # Safety
///
/// `workspace` comes from [`cadre_workspace`], or is null.
unsafe fn scratch(gpu: &Gpu, workspace: *const Scratch) -> Result<Scratch, Failed> {
    // SAFETY: the caller's promise.
    Ok(match unsafe { workspace.as_ref() } {
        Some(it) => it.clone(),
        None => Scratch::new(gpu)?,
    })
}

/// What a plan is made with: the GPU, the caller's stream, its lines.
///
/// # Safety
///
/// `gpu` comes from [`crate::cadre_open`]; the lines are as many as is said.
unsafe fn planning<'a>(
    gpu: *const Gpu,
    stream: u64,
    (lines, count): (*const TaskLine, u64),
) -> Result<(&'a Gpu, Stream, &'a [TaskLine]), Failed> {
    // SAFETY: the caller's promise.
    let (gpu, lines) = unsafe { (given(gpu, "gpu")?, listed(lines, count, "tasks")?) };
    // SAFETY: the caller's promise.
    Ok((gpu, unsafe { Stream::foreign(gpu, stream) }, lines))
}

/// What a plan runs with: the caller's stream, the plan, and its tensors.
///
/// # Safety
///
/// `gpu` comes from [`crate::cadre_open`], `plan` from the call that makes such plans; the tensors are as many as is said.
unsafe fn running<'a, P>(
    gpu: *const Gpu,
    plan: *mut P,
    stream: u64,
    (tensors, count): (*const Tensor, u64),
) -> Result<(Stream, &'a mut P, &'a [Tensor]), Failed> {
    // SAFETY: the caller's promise.
    let (gpu, plan) = unsafe { (given(gpu, "gpu")?, given_mut(plan, "plan")?) };
    // SAFETY: the caller's promise.
    let tensors = unsafe { listed(tensors, count, "tensors") }?;
    // SAFETY: the caller's promise.
    Ok((unsafe { Stream::foreign(gpu, stream) }, plan, tensors))
}

/// Makes a forward plan of `count` lines on a stream of the GPU; null on error.
///
/// # Safety
///
/// `gpu` comes from [`crate::cadre_open`], `workspace` from [`cadre_workspace`] or is null; `lines` are `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_plan(
    gpu: *const Gpu,
    workspace: *const Scratch,
    stream: u64,
    shape: LaunchShape,
    lines: *const TaskLine,
    count: u64,
) -> *mut ForwardPlan {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let (gpu, stream, lines) = unsafe { planning(gpu, stream, (lines, count)) }?;
        let task =
            |it: &TaskLine| ForwardTask { mask: it.mask(), keys: it.keys(), rows: it.rows() };
        let tasks: Vec<_> = lines.iter().map(task).collect();
        // SAFETY: the caller's promise.
        let scratch = unsafe { scratch(gpu, workspace) }?;
        let mut plan = ForwardPlan::with(&stream, shape.shape(), &tasks, &scratch)?;
        // Runs of the plan may be captured, which cannot allocate.
        plan.prepare_sinks(&stream)?;
        Ok(Box::into_raw(Box::new(plan)))
    })
}

/// Puts a forward launch on a stream. Tensors: Q, K, V, O (bf16), LSE (f32).
///
/// # Safety
///
/// `plan` comes from [`cadre_forward_plan`]; the five tensors lie where they say until the stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_run(
    gpu: *const Gpu,
    plan: *mut ForwardPlan,
    stream: u64,
    tensors: *const Tensor,
) -> i32 {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (stream, plan, it) = unsafe { running(gpu, plan, stream, (tensors, 5)) }?;
        // SAFETY: the caller's promise, for each tensor.
        let tensors = unsafe {
            let [q, k, v] = [it[0].read(), it[1].read(), it[2].read()];
            ForwardTensors { q, k, v, out: it[3].write(), lse: it[4].write() }
        };
        plan.run(&stream, tensors)?;
        Ok(0)
    })
}

/// Applies sinks behind a forward launch. Tensors: sinks (f32, one a query head), O (bf16), LSE (f32).
///
/// # Safety
///
/// `plan` comes from [`cadre_forward_plan`]; the three tensors lie where they say until the stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_sink(
    gpu: *const Gpu,
    plan: *mut ForwardPlan,
    stream: u64,
    tensors: *const Tensor,
) -> i32 {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (stream, plan, it) = unsafe { running(gpu, plan, stream, (tensors, 3)) }?;
        // SAFETY: the caller's promise, for each tensor.
        let (sinks, rows) = unsafe { (it[0].read(), (it[1].write(), it[2].write())) };
        plan.sink(&stream, sinks, rows)?;
        Ok(0)
    })
}

/// Pairs of query and key in the tiles that a plan multiplies.
///
/// # Safety
///
/// `plan` comes from [`cadre_forward_plan`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_forward_tile_pairs(plan: *const ForwardPlan) -> u64 {
    // SAFETY: the caller's promise.
    guard(0, || Ok(unsafe { given(plan, "plan") }?.tile_pairs()))
}

sized_and_freed!(
    ForwardPlan,
    "plan",
    list_bytes,
    cadre_forward_bytes,
    cadre_forward_free,
    "Ends a forward plan; work that uses it is waited for."
);

/// Makes a backward plan of `count` lines on a stream of the GPU; null on error.
///
/// # Safety
///
/// `gpu` comes from [`crate::cadre_open`], `workspace` from [`cadre_workspace`] or is null; `lines` are `count`, those of a bundle side by side.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_backward_plan(
    gpu: *const Gpu,
    workspace: *const Scratch,
    stream: u64,
    shape: LaunchShape,
    lines: *const TaskLine,
    count: u64,
) -> *mut BackwardPlan {
    guard(std::ptr::null_mut(), || {
        // SAFETY: the caller's promise.
        let (gpu, stream, lines) = unsafe { planning(gpu, stream, (lines, count)) }?;
        for (index, pair) in lines.windows(2).enumerate() {
            let keys = |it: &TaskLine| (it.mask, it.keys(), it.dkv_row);
            if pair[0].bundle == pair[1].bundle && keys(&pair[0]) != keys(&pair[1]) {
                let (index, bundle) = (index + 1, pair[1].bundle);
                let text = format!(
                    "task {index}: mask, keys or dkv_row differ from those of bundle {bundle}; give it a bundle of its own"
                );
                return Err(text.into());
            }
        }
        let bundle = |lines: &[TaskLine]| BackwardBundle {
            mask: lines[0].mask(),
            keys: lines[0].keys(),
            dkv_row: lines[0].dkv_row,
            parts: lines.iter().map(TaskLine::rows).collect(),
        };
        let bundles: Vec<_> = lines.chunk_by(|a, b| a.bundle == b.bundle).map(bundle).collect();
        let order = if shape.fixed_order != 0 { Order::Fixed } else { Order::Arrival };
        let cut = (order, shape.launches);
        // SAFETY: the caller's promise.
        let scratch = unsafe { scratch(gpu, workspace) }?;
        let plan = BackwardPlan::with(&stream, shape.shape(), &bundles, cut, &scratch)?;
        Ok(Box::into_raw(Box::new(plan)))
    })
}

/// Puts backward launches on a stream. Tensors: Q, dO, K, V (bf16), LSE, Δ, dQ, dK, dV (f32); with `narrow` dQ is bf16.
///
/// # Safety
///
/// `plan` comes from [`cadre_backward_plan`]; the nine tensors lie where they say until the stream is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cadre_backward_run(
    gpu: *const Gpu,
    plan: *mut BackwardPlan,
    stream: u64,
    tensors: *const Tensor,
    narrow: u32,
) -> i32 {
    guard(-1, || {
        // SAFETY: the caller's promise.
        let (stream, plan, it) = unsafe { running(gpu, plan, stream, (tensors, 9)) }?;
        // SAFETY: the caller's promise, for each tensor.
        let tensors = unsafe {
            BackwardTensors {
                q: it[0].read(),
                dout: it[1].read(),
                k: it[2].read(),
                v: it[3].read(),
                lse: it[4].read(),
                delta: it[5].read(),
                dq: match narrow {
                    0 => QueryGradients::F32(it[6].write()),
                    _ => QueryGradients::Bf16(it[6].write()),
                },
                dk: it[7].write(),
                dv: it[8].write(),
            }
        };
        plan.run(&stream, tensors)?;
        Ok(0)
    })
}

sized_and_freed!(
    BackwardPlan,
    "plan",
    list_bytes,
    cadre_backward_bytes,
    cadre_backward_free,
    "Ends a backward plan; work that uses it is waited for."
);
