//! Hopper kernels and their raw launches: the only crate that sees nvcc and the CUDA driver.
//!
//! `plan` is the way in: the CPU's `suanpan_attn::Problem` becomes a kernel with its reasons, and runs. `attention` holds the raw launches under it:
//! a launch takes device addresses and shapes, checks what the hardware would otherwise answer with garbage, and puts one kernel on a
//! stream. Not here: any transformer.
//!
//! `nccl` carries messages between devices.
//!
//! Without the feature `cuda` this crate is empty. With it, the build compiles `kernels/**` with nvcc 13.0 and fails on a spill or on products that
//! the assembler serialises; the cubins are embedded, so that a binary starts on a machine without a GPU and says so.
//!
//! `kernels/attention/forward.cu`: bf16 and fp16, head dims 64, 96, 128, 192, 192/128, 256; full, causal, windows, chunks, tree masks, softcap, ALiBi,
//! sinks, bias, dropout; grouped heads, packed ragged sequences, contiguous or paged K and V, lse out.
//! `kernels/attention/forward_fp8.cu`: e4m3 q, k, v, bf16 o, head dims 128 and 256, full and causal, scales a (sequence, kv head), lse out.
//! `kernels/attention/decode_cluster.cu`: decode over bf16, e4m3, 8-bit and 4-bit K and V, head dims 64, 128, 256, pages of any multiple of 16
//! tokens, lengths and page tables read on the device, softcap, ALiBi, window and sinks, batch-invariant where asked.
//! `kernels/attention/decode_mla.cu`: bf16 decode of latent attention, keys of 576 elements whose first 512 are the values.
//! `kernels/attention/decode.cu`: bf16 decode of 17 to 64 query rows a kv head, and of many sequences on one kv head.
//! Versions, predictions and outcomes: docs/cuda-attn-notes.md.
#![cfg(feature = "cuda")]

pub mod attention;
pub mod driver;
pub mod nccl;
pub mod plan;
pub mod shapes;
pub mod tensor_map;
#[doc(hidden)]
#[allow(missing_docs)]
pub mod testing;

/// What a launch can refuse or fail with. The messages say what the fields are.
#[allow(missing_docs)]
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The driver library is not on this machine.
    #[error("no CUDA driver (libcuda.so.1 not found): GPU path off")]
    NoDriver,
    /// The device is not a Hopper.
    #[error("device {name} has compute capability {major}.{minor}; these kernels need 9.0")]
    NotHopper { name: String, major: i32, minor: i32 },
    /// A shape or stride that no kernel here takes.
    #[error("{field}: {asked} asked; supported: {supported}")]
    Unsupported { field: &'static str, asked: String, supported: &'static str },
    /// A plan or a call that no kernel here takes.
    #[error(transparent)]
    Bad(#[from] suanpan_base::BadArgument),
    /// NCCL is missing, refused or failed.
    #[error(transparent)]
    Nccl(#[from] nccl::Error),
    /// The driver refused a call.
    #[error("{call}: {source}")]
    Driver { call: &'static str, source: cudarc::driver::DriverError },
}

/// Operand types of the matrix kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// Brain floating point.
    Bf16,
    /// IEEE half precision.
    Fp16,
}

impl Dtype {
    /// The name used in cubin names and messages.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16",
            Dtype::Fp16 => "fp16",
        }
    }
}
