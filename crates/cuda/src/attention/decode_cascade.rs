//! Decode over a prefix that all sequences share: the prefix is read once for many sequences' queries, then each sequence's own keys
//! follow and the two results join. Not here: kernels; these are launches of [`Decode`].
use super::decode::{Decode, Fused, Plan, Prior};
use crate::Error;
use crate::driver::{Address, Gpu};

/// Where the shared keys lie, and room for the result over them.
#[derive(Clone, Copy, Debug)]
pub struct Prefix {
    /// One i32: keys of the prefix, read on the device.
    pub seqlen_k: Address,
    /// `[pages_max]` i32.
    pub page_table: Address,
    /// Length of the page table.
    pub pages_max: u32,
    /// `[batch * seqlen_q, num_q_heads, head_dim]` f32, overwritten.
    pub o: Address,
    /// `[num_q_heads, batch * seqlen_q]` f32, overwritten.
    pub lse: Address,
    /// Bytes as [`Cascade::prefix_partial_bytes`], all bits one before the first launch, left so; none of it the suffixes'.
    pub partial: Address,
}

/// A decode whose sequences begin with the same keys. `suffix` speaks of what follows these: lengths, pages.
#[derive(Clone, Copy, Debug)]
pub struct Cascade {
    /// Without a prior, f32 output or an lse row of its own; its lengths are at least `seqlen_q`.
    pub suffix: Decode,
    /// The shared keys.
    pub prefix: Prefix,
}

/// The launches of a cascade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CascadePlan {
    /// Query tokens whose rows read the prefix together.
    pub together: u32,
    /// For all full groups of `together`.
    pub prefix: Plan,
    /// For the tokens left over, where there are any.
    pub rest: Option<Plan>,
    /// For the suffixes.
    pub suffix: Plan,
}

impl std::fmt::Display for CascadePlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "prefix for {} tokens at once ({}); suffixes: {}", self.together, self.prefix, self.suffix)
    }
}

/// Most query rows that read K and V together.
const ROWS_MAX: u32 = 64;

impl Cascade {
    /// The prefix's launch for tokens `first .. first + groups * together` of all query tokens.
    fn over_prefix(&self, first: u32, groups: u32, together: u32) -> Decode {
        let (d, p, first) = (&self.suffix, &self.prefix, u64::from(first));
        let row = u64::from(d.num_q_heads) * u64::from(d.head_dim);
        let mut q = d.q;
        q.address += first * q.token_stride * 2;
        Decode {
            q,
            o: p.o + first * row * 4,
            lse: p.lse + first * 4,
            seqlens_k: p.seqlen_k,
            page_table: p.page_table,
            partial: p.partial,
            pages_max: p.pages_max,
            batch: groups,
            seqlen_q: together,
            fused: Fused {
                wide: true,
                all_keys: true,
                shared_pages: true,
                lse_row: d.batch * d.seqlen_q,
                ..Fused::default()
            },
            scores: super::decode::Scores { sinks: None, ..d.scores },
            ..*d
        }
    }

    /// Groups, tokens of each, tokens left over.
    fn groups(&self) -> (u32, u32, u32) {
        let d = &self.suffix;
        let tokens = d.batch * d.seqlen_q;
        let group = (d.num_q_heads / d.num_kv_heads.max(1)).max(1);
        let together = (ROWS_MAX / group).clamp(1, tokens.max(1));
        (tokens / together, together, tokens % together)
    }

    /// The launches for a device with `num_sms` multiprocessors, from shapes alone.
    pub fn plan(&self, num_sms: u32) -> CascadePlan {
        let (groups, together, rest) = self.groups();
        let rest_plan = |n| self.over_prefix(0, 1, n).plan(num_sms);
        CascadePlan {
            together,
            prefix: self.over_prefix(0, groups, together).plan(num_sms),
            rest: (rest > 0).then(|| rest_plan(rest)),
            suffix: self.joined().plan(num_sms),
        }
    }

    fn joined(&self) -> Decode {
        let prior = Some(Prior { o: self.prefix.o, lse: self.prefix.lse });
        Decode { fused: Fused { prior, ..self.suffix.fused }, ..self.suffix }
    }

    /// Bytes of the prefix's `partial`.
    pub fn prefix_partial_bytes(&self, plan: CascadePlan, num_sms: u32) -> u64 {
        let (groups, together, rest) = self.groups();
        let whole = self.over_prefix(0, groups, together).partial_bytes(plan.prefix, num_sms);
        whole.max(plan.rest.map_or(0, |p| self.over_prefix(0, 1, rest).partial_bytes(p, num_sms)))
    }

    /// Puts the launches of `plan` on the device's stream.
    ///
    /// # Safety
    /// As `Decode::launch` for the suffixes and for the prefix.
    pub unsafe fn launch(&self, gpu: &Gpu, plan: CascadePlan) -> Result<(), Error> {
        let bad = |field, asked: String, supported| Err(Error::Unsupported { field, asked, supported });
        let (d, f) = (&self.suffix, &self.suffix.fused);
        if f.prior.is_some() || f.wide || f.all_keys || f.shared_pages || f.lse_row != 0 || f.rotary.is_some()
        {
            return bad(
                "suffix.fused",
                format!("{f:?}"),
                "append and table_row alone: a cascade sets the rest itself",
            );
        }
        if d.scores.left.is_some() || d.scores.slopes.is_some() {
            return bad(
                "suffix.scores",
                format!("{:?}", d.scores),
                "no window and no ALiBi over a shared prefix",
            );
        }
        if d.batch_invariant {
            return bad("batch_invariant", "over a shared prefix".into(), "single launches");
        }
        let (groups, together, rest) = self.groups();
        if plan.together != together {
            return bad("plan", format!("{} tokens together", plan.together), "the plan of these shapes");
        }
        // SAFETY: the caller vouches for the addresses; the launches run one after another.
        unsafe {
            self.over_prefix(0, groups, together).launch(gpu, plan.prefix)?;
            if let Some(p) = plan.rest {
                self.over_prefix(groups * together, 1, rest).launch(gpu, p)?;
            }
            self.joined().launch(gpu, plan.suffix)
        }
    }
}
