//! The plan of an attention call on a Hopper device: the CPU's `Problem` becomes a kernel, its tiles, a workspace and books, by pure rules.
//!
//! ```text
//! suanpan_attn::Problem + Device + Limits -> Plan::new -> schedule(lengths) -> run(gpu, plan, args, workspace)
//! ```
//! Nothing here touches a device. What no kernel takes is refused by field; what only a slower kernel takes is refused too, unless the
//! caller allows it (`Slower::Allow`), and the plan then says what it gave up.

mod books;
mod check;
mod choose;
mod run;
#[cfg(test)]
mod tests;
mod unpack;

use std::fmt;

use suanpan_attn::{Limits, Problem};
use suanpan_base::{BadArgument, SeqLen};
use suanpan_ledger::{AttnBooks, Entry};

use crate::attention::decode;
use crate::shapes::{ForwardShape, Fp8Shape};
pub use run::{Args, Bias, Bound, Extras, KeyCodes, Scales, View, Workspace, run};

/// The name under which plans refuse.
const OP: &str = "cuda attention plan";

/// What a plan must know of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Multiprocessors.
    pub num_sms: u32,
}

impl Device {
    /// NVIDIA H200 (and H100 SXM).
    pub const H200: Device = Device { num_sms: 132 };
}

/// Whether a call may run on a kernel that is known to be slower than another one for its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slower {
    /// No: the plan is refused, and names the kernel that would do it.
    Refuse,
    /// Yes: the plan names the kernel and what it gave up.
    Allow,
}

/// What runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// `kernels/attention/forward.cu`: 16-bit q, k, v.
    Forward {
        /// The build.
        shape: ForwardShape,
        /// The function of its cubin.
        function: &'static str,
        /// A tile has all query heads of a kv head.
        pack_gqa: bool,
        /// Parts of a tile's keys, each a block's; 1: none.
        splits: u32,
        /// Quantised keys and values become bf16 rows first, by `kernels/attention/unpack.cu`.
        unpacks: Option<decode::KvType>,
    },
    /// `kernels/attention/forward_fp8.cu` on q made e4m3 by `kernels/attention/quantise.cu`.
    ForwardFp8 {
        /// The build.
        shape: Fp8Shape,
        /// The function of its cubin.
        function: &'static str,
    },
    /// `kernels/attention/decode_cluster.cu` or `decode.cu`.
    Decode(decode::Plan),
}

/// A kernel with the reasons for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// What runs.
    pub kernel: Kernel,
    /// Why this one.
    pub why: &'static str,
    /// The faster kernel that refused, and over what; only under [`Slower::Allow`].
    pub gave_up: Option<String>,
}

/// Kernel, tiles and workspace for a batch of sequences. Made once per problem; scheduled again per call.
#[derive(Clone, Debug)]
pub struct Plan {
    problem: Problem,
    device: Device,
    limits: Limits,
    slower: Slower,
    seqs: Vec<SeqLen>,
    choice: Option<Choice>,
}

impl Plan {
    /// A plan for `problem` on `device` with room for schedules within `limits`. Refuses what no kernel takes, by name.
    pub fn new(
        problem: &Problem,
        device: Device,
        limits: Limits,
        slower: Slower,
    ) -> Result<Plan, BadArgument> {
        problem.check()?;
        choose::check_any(problem)?;
        for (field, n) in [
            ("max_seqs", limits.max_seqs),
            ("max_total_q", limits.max_total_q),
            ("max_seqlen_k", limits.max_seqlen_k),
        ] {
            if n > choose::TOKENS_MAX {
                return Err(BadArgument::new(OP, field, n, "at most 2^30"));
            }
        }
        let plan = Plan { problem: *problem, device, limits, slower, seqs: Vec::new(), choice: None };
        plan.layout()?;
        Ok(Plan { seqs: Vec::with_capacity(limits.max_seqs), ..plan })
    }

    /// What the plan is for.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The device it was made for.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Lays out a batch and chooses its kernel. A refusal keeps the old schedule.
    pub fn schedule(&mut self, seqs: &[SeqLen]) -> Result<(), BadArgument> {
        let most = |field: &str, n: usize, limit: usize| {
            let supported = format!("at most {limit}");
            if n > limit { Err(BadArgument::new(OP, field, n, supported)) } else { Ok(()) }
        };
        most("seqs", seqs.len(), self.limits.max_seqs)?;
        let mut totals = [0usize; 2];
        for (i, s) in seqs.iter().enumerate() {
            most(&format!("seqs[{i}].seqlen_k"), s.seqlen_k, self.limits.max_seqlen_k)?;
            totals = [totals[0].saturating_add(s.seqlen_q), totals[1].saturating_add(s.seqlen_k)];
        }
        most("total seqlen_q", totals[0], self.limits.max_total_q)?;
        most("total seqlen_k", totals[1], choose::TOKENS_MAX)?;
        let whole = unpack::groups(self.limits, seqs).len() == 1;
        let choice =
            choose::choose(&self.problem, seqs, (self.device, whole), self.pages_max(), self.slower)?;
        self.seqs.clear();
        self.seqs.extend_from_slice(seqs);
        self.choice = Some(choice);
        Ok(())
    }

    /// The kernel of the current schedule; `None` before the first.
    pub fn choice(&self) -> Option<&Choice> {
        self.choice.as_ref()
    }

    /// Splits of the longest sequence's keys.
    pub fn splits(&self) -> u32 {
        match self.choice.as_ref().map(|c| c.kernel) {
            Some(Kernel::Decode(decode::Plan::Clusters { ranks, parts, .. })) => ranks * parts,
            Some(Kernel::Decode(decode::Plan::Line)) => self.device.num_sms,
            Some(Kernel::Forward { splits, .. }) => splits,
            _ => 1,
        }
    }

    /// What the ledger expects sequence `seq` of the schedule to compute, and to load from behind the tiles (L2 or memory).
    pub fn predicted(&self, seq: usize) -> AttnBooks {
        books::predicted(self, self.seqs[seq])
    }

    /// What the ledger expects the schedule to move through device memory. `ncu` counts it: docs/cuda-attn-notes.md.
    pub fn predicted_device(&self) -> Entry {
        books::device(self)
    }

    /// Bytes of a workspace for every schedule within the limits.
    pub fn workspace_bytes(&self) -> u64 {
        self.layout().map_or(0, |l| l.bytes)
    }

    /// Row length of the page table on the device.
    fn pages_max(&self) -> usize {
        match self.problem.kv {
            suanpan_attn::KvLayout::Contiguous => 0,
            suanpan_attn::KvLayout::Paged { page_size } => {
                self.limits.max_seqlen_k.div_ceil(page_size).max(1)
            }
        }
    }

    fn layout(&self) -> Result<run::Layout, BadArgument> {
        run::Layout::of(self)
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kernel::Forward { shape: s, function, pack_gqa, splits, unpacks } => {
                let rows = 64 * s.warpgroups;
                if let Some(kv_type) = unpacks {
                    write!(f, "unpack ({} to bf16), ", kv_type.name())?;
                }
                let packed = if *pack_gqa { " of (token, head of a group)" } else { "" };
                write!(f, "{function} (forward.cu), tile {rows}{packed} x {}, {} stages", s.keys, s.stages)?;
                if *splits > 1 { write!(f, ", keys in {splits} parts, forward_combine") } else { Ok(()) }
            }
            Kernel::ForwardFp8 { shape: s, function } => {
                let rows = 64 * s.warpgroups;
                write!(f, "quantise_q, {function} (forward_fp8.cu), tile {rows} x 128, {} stages", s.k_stages)
            }
            Kernel::Decode(decode::Plan::Line) => f.write_str(
                "decode (decode.cu), tile 64 rows, 6 stages, one line of tiles cut into equal parts",
            ),
            Kernel::Decode(plan) => write!(f, "decode_cluster (decode_cluster.cu), a ring a warp, {plan}"),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (p, h) = (&self.problem, self.problem.heads);
        writeln!(
            f,
            "cuda attention: {} query heads over {} kv heads, head_dim {}/{}, q {}, kv {} ({}), {}{}, {}; {} multiprocessors",
            h.num_q_heads,
            h.num_kv_heads,
            h.head_dim_qk,
            h.head_dim_v,
            p.q_dtype,
            p.kv_dtype,
            p.kv_scales,
            p.mask,
            p.scores,
            p.kv,
            self.device.num_sms
        )?;
        let Some(choice) = &self.choice else { return writeln!(f, "  no schedule yet") };
        let (q, k) = self.seqs.iter().fold((0, 0), |(q, k), s| (q + s.seqlen_q, k + s.seqlen_k));
        writeln!(f, "  {} sequences, q {q} k {k}: {} ({})", self.seqs.len(), choice.kernel, choice.why)?;
        if let Some(gave_up) = &choice.gave_up {
            writeln!(f, "  slower than {gave_up}")?;
        }
        let (flops, entry) =
            ((0..self.seqs.len()).map(|i| self.predicted(i).flops).sum::<u64>(), self.predicted_device());
        writeln!(
            f,
            "  {} splits, workspace {} bytes; {:.3e} FLOPs, memory reads {} bytes, writes {} bytes",
            self.splits(),
            self.workspace_bytes(),
            flops as f64,
            entry.device_read_bytes,
            entry.device_write_bytes
        )
    }
}
