//! Matrix products of f32 on a GPU, by cuBLASLt.
//!
//! In: row-major matrices in device memory, as they are or transposed. Out: C = A·B or C += A·B, in the order of a stream. The
//! library is opened at run time; without it there is an error that says so, and no panic.
//!
//! It uses no tensor cores: f32 stays f32 (`CUBLAS_COMPUTE_32F`), so that a model that is trained here agrees with the CPU's
//! within rounding. No sum is divided between blocks (no reduction scheme is allowed), so a product has the same bits whenever it
//! is repeated with one library on one kind of GPU. Invariant: the library only gets memory inside the tensors.

// Every function of the library is unsafe to call.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};
use std::mem::MaybeUninit;

use cudarc::cublaslt::sys;

use super::check::Refusal;
use super::driver::Gpu;
use super::error::Error;
use super::memory::{Buffer, Stream};
use super::slice::{Slice, SliceMut};
use crate::matmul::Accumulate;

/// Workspace of the algorithms, in elements of f32: 32 MiB, as NVIDIA advises for Hopper.
const WORKSPACE: usize = 8 << 20;
/// Bytes to which matrices are aligned; the library takes faster kernels then.
pub(super) const ALIGNMENT: usize = 256;

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum View {
    /// Row-major, as the product needs it.
    Rows,
    /// Row-major with rows and columns exchanged.
    Transposed,
}

/// C `[m, n]` of A `[m, k]` and B `[k, n]`, where each lies as its view says.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Product {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: View,
    pub(super) b: View,
}

/// The library with a workspace, for one stream at a time.
pub(super) struct Blas {
    gpu: Gpu,
    handle: sys::cublasLtHandle_t,
    workspace: Buffer<f32>,
    plans: BTreeMap<Product, Plan>,
}

// SAFETY: handles of the library, which may be used from any thread, one at a time.
unsafe impl Send for Blas {}

impl std::fmt::Debug for Blas {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Blas")
            .field("gpu", &self.gpu)
            .field("plans", &self.plans.len())
            .finish_non_exhaustive()
    }
}

/// A product that the library has chosen an algorithm for.
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    /// Layouts of B, A and C. The library is column-major, so it computes Cᵀ = Bᵀ·Aᵀ.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

/// Version of the opened library, 10000 · major + 100 · minor + patch. Bits are promised within one
/// version.
pub(crate) fn version() -> usize {
    // SAFETY: no precondition but that the library is there.
    unsafe { sys::cublasLtGetVersion() }
}

fn call(
    name: &'static str,
    what: impl FnOnce() -> String,
    code: sys::cublasStatus_t,
) -> Result<(), Error> {
    if code == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: gives a static string for every number.
    let text = unsafe { sys::cublasLtGetStatusName(code) };
    let text = if text.is_null() {
        String::new()
    } else {
        // SAFETY: it is not null, and static.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(Error::Blas { call: name, what: what(), name: text, code: code as u32 })
}

impl Blas {
    /// Opens the library for `gpu`.
    ///
    /// # Errors
    ///
    /// [`Error::NoBlas`], the library's, or too little memory for its workspace.
    pub(super) fn new(gpu: &Gpu) -> Result<Self, Error> {
        // SAFETY: opens the library and closes it again; what follows may be called if it is there.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::NoBlas);
        }
        let workspace = Buffer::new(gpu, WORKSPACE, "the workspace of cuBLASLt")?;
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys.
        call("cublasLtCreate", String::new, unsafe { sys::cublasLtCreate(&raw mut handle) })?;
        Ok(Self { gpu: gpu.clone(), handle, workspace, plans: BTreeMap::new() })
    }

    /// Enqueues a product on `stream`. An empty product does nothing; with `k` = 0 nothing is added.
    ///
    /// # Errors
    ///
    /// A tensor of another length, one that is not aligned to [`ALIGNMENT`], or the library's.
    pub(super) fn run(
        &mut self,
        stream: &Stream,
        product: Product,
        (a, b): (Slice<'_, f32>, Slice<'_, f32>),
        c: &SliceMut<'_, f32>,
        accumulate: Accumulate,
    ) -> Result<(), Error> {
        let Product { m, n, k, .. } = product;
        let (a, b, c) = (a.place(), b.place(), c.place());
        for (field, expected, (address, actual)) in
            [("a", m * k, a), ("b", k * n, b), ("c", m * n, c)]
        {
            if actual != expected {
                return Err(Refusal::Length { field, expected, actual }.into());
            }
            if !address.is_multiple_of(ALIGNMENT as u64) {
                return Err(
                    Refusal::Alignment { field, address, multiple: ALIGNMENT as u64 }.into()
                );
            }
        }
        if m * n * k == 0 {
            return Ok(());
        }
        let said = || format!(", a product of {m} × {k} × {n}");
        self.gpu.bind()?;
        if !self.plans.contains_key(&product) {
            let plan = Plan::new(self.handle, product)?;
            self.plans.insert(product, plan);
        }
        let plan = &self.plans[&product];
        let [of_b, of_a, of_c] = plan.layouts;
        let factor = 1.0_f32;
        let kept = if accumulate == Accumulate::Add { 1.0_f32 } else { 0.0 };
        let place = |(address, _): (u64, usize)| address as *mut c_void;
        let (workspace, numbers) = self.workspace.slice().place();
        stream.runs(format!("cublasLtMatmul{}", said()));
        // SAFETY: the tensors are as long as the layouts say, which was checked; C is not read when its factor is 0; the
        // workspace is this stream's until the next product, which comes behind.
        let code = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                plan.operation,
                (&raw const factor).cast(),
                place(b),
                of_b,
                place(a),
                of_a,
                (&raw const kept).cast(),
                place(c),
                of_c,
                place(c),
                of_c,
                &raw const plan.algorithm,
                workspace as *mut c_void,
                numbers * 4,
                stream.handle().cast(),
            )
        };
        call("cublasLtMatmul", said, code)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        self.plans.clear();
        if self.gpu.bind().is_ok() {
            // SAFETY: created by `new`.
            let _ = unsafe { sys::cublasLtDestroy(self.handle) };
        }
    }
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, product: Product) -> Result<Self, Error> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Product { m, n, k, a, b } = product;
        let mut plan = Self {
            operation: std::ptr::null_mut(),
            layouts: [std::ptr::null_mut(); 3],
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        let f32s = sys::cudaDataType_t::CUDA_R_32F;
        let exact = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: writes a handle, which `drop` destroys.
        let code = unsafe { sys::cublasLtMatmulDescCreate(&raw mut plan.operation, exact, f32s) };
        call("cublasLtMatmulDescCreate", String::new, code)?;
        // A row-major matrix is the library's transposed one.
        for (attribute, view) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, b),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, a),
        ] {
            // CUBLAS_OP_N and CUBLAS_OP_T of the library's header, which the bindings of this part lack.
            let operation: i32 = match view {
                View::Rows => 0,
                View::Transposed => 1,
            };
            // SAFETY: the attribute is one word, which is copied.
            let code = unsafe {
                sys::cublasLtMatmulDescSetAttribute(
                    plan.operation,
                    attribute,
                    (&raw const operation).cast(),
                    size_of_val(&operation),
                )
            };
            call("cublasLtMatmulDescSetAttribute", String::new, code)?;
        }
        let stored = |rows, columns, view| match view {
            View::Rows => (rows, columns),
            View::Transposed => (columns, rows),
        };
        let shapes = [stored(k, n, b), stored(m, k, a), (m, n)];
        for (layout, (rows, columns)) in plan.layouts.iter_mut().zip(shapes) {
            // SAFETY: writes a handle, which `drop` destroys.
            let code = unsafe {
                sys::cublasLtMatrixLayoutCreate(
                    layout,
                    f32s,
                    columns as u64,
                    rows as u64,
                    columns as i64,
                )
            };
            call("cublasLtMatrixLayoutCreate", String::new, code)?;
        }
        plan.algorithm = plan.choose(handle, product)?;
        Ok(plan)
    }

    /// The algorithm that the library expects to be fastest among those that never divide a sum.
    fn choose(
        &self,
        handle: sys::cublasLtHandle_t,
        Product { m, n, k, .. }: Product,
    ) -> Result<sys::cublasLtMatmulAlgo_t, Error> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let preference = Preference::new()?;
        let undivided = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &undivided)?;
        let bytes: u64 = (WORKSPACE * 4) as u64;
        preference.set(Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes)?;
        let [b, a, c] = self.layouts;
        let mut found = MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        let mut count = 0;
        // SAFETY: writes at most one result, and how many.
        let code = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.operation,
                b,
                a,
                c,
                c,
                preference.0,
                1,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        let said = || format!(", a product of {m} × {k} × {n}");
        call("cublasLtMatmulAlgoGetHeuristic", said, code)?;
        if count < 1 {
            let code = sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED;
            call("cublasLtMatmulAlgoGetHeuristic", said, code)?;
        }
        // SAFETY: one result was written.
        let found = unsafe { found.assume_init() };
        call("cublasLtMatmulAlgoGetHeuristic", said, found.state)?;
        Ok(found.algo)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in self.layouts.into_iter().filter(|it| !it.is_null()) {
            // SAFETY: created by `new`.
            let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(layout) };
        }
        if !self.operation.is_null() {
            // SAFETY: created by `new`.
            let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.operation) };
        }
    }
}

/// The constraints on the library's choice of an algorithm.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self, Error> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes a handle, which `drop` destroys.
        let code = unsafe { sys::cublasLtMatmulPreferenceCreate(&raw mut handle) };
        call("cublasLtMatmulPreferenceCreate", String::new, code)?;
        Ok(Self(handle))
    }

    fn set<T>(
        &self,
        attribute: sys::cublasLtMatmulPreferenceAttributes_t,
        value: &T,
    ) -> Result<(), Error> {
        let value: *const T = value;
        // SAFETY: the value is copied; the library refuses another size than the attribute's.
        let code = unsafe {
            sys::cublasLtMatmulPreferenceSetAttribute(
                self.0,
                attribute,
                value.cast(),
                size_of::<T>(),
            )
        };
        call("cublasLtMatmulPreferenceSetAttribute", String::new, code)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}
