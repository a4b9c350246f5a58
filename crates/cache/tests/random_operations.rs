//! Random operations on pool, page tables and prefix cache against a model, with the books checked after each.

mod common;

use common::{Op, World};
use proptest::prelude::*;
use suanpan_cache::EvictionPolicy;

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0u32..2, 0..14)
}

fn op() -> impl Strategy<Value = Op> {
    let (i, n) = (0usize..64, 0usize..14);
    let namespace = 0u64..2;
    let priority = -1i32..2;
    prop_oneof![
        1 => Just(Op::Alloc),
        1 => i.clone().prop_map(Op::Share),
        2 => i.clone().prop_map(Op::DropHandle),
        6 => (namespace.clone(), tokens()).prop_map(|(namespace, tokens)| Op::Admit { namespace, tokens }),
        6 => (i.clone(), n.clone()).prop_map(|(table, tokens)| Op::Chunk { table, tokens }),
        4 => (i.clone(), 0u32..2).prop_map(|(table, token)| Op::Decode { table, token }),
        6 => (i.clone(), n.clone(), priority)
            .prop_map(|(table, tokens, priority)| Op::Publish { table, tokens, priority }),
        1 => (i.clone(), namespace.clone()).prop_map(|(table, namespace)| Op::PublishElsewhere { table, namespace }),
        1 => (i.clone(), n.clone()).prop_map(|(table, tokens)| Op::Truncate { table, tokens }),
        2 => (i.clone(), n.clone()).prop_map(|(table, tokens)| Op::Fork { table, tokens }),
        1 => i.clone().prop_map(Op::Preempt),
        5 => i.clone().prop_map(Op::DropTable),
        1 => i.clone().prop_map(Op::SwapOut),
        1 => (i.clone(), 0usize..12).prop_map(|(swapped, fails_at)| Op::SwapIn { swapped, fails_at }),
        1 => (namespace, tokens(), i.clone()).prop_map(|(namespace, tokens, page)| Op::HoldPart { namespace, tokens, page }),
        1 => n.prop_map(Op::Evict),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_operation_leaves_the_books_balanced(
        num_pages in 1usize..24, policy in prop::sample::select(&EvictionPolicy::ALL),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut world = World::new(num_pages, policy);
        for op in &ops {
            world.apply(op);
        }
        world.finish();
    }
}

/// SplitMix64: a long run needs no shrinking, only a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn tokens(&mut self) -> Vec<u32> {
        (0..self.below(14)).map(|_| self.below(2) as u32).collect()
    }

    fn op(&mut self) -> Op {
        let (i, n, namespace) = (self.below(64), self.below(14), self.below(2) as u64);
        match self.below(42) {
            0 => Op::Alloc,
            1 => Op::Share(i),
            2..=3 => Op::DropHandle(i),
            4..=9 => Op::Admit { namespace, tokens: self.tokens() },
            10..=13 => Op::Decode { table: i, token: self.below(2) as u32 },
            14..=20 => Op::Publish { table: i, tokens: n, priority: self.below(3) as i32 - 1 },
            21 => Op::PublishElsewhere { table: i, namespace },
            22 => Op::Truncate { table: i, tokens: n },
            23..=24 => Op::Fork { table: i, tokens: n },
            25..=30 => Op::DropTable(i),
            31..=36 => Op::Chunk { table: i, tokens: n },
            37 => Op::Preempt(i),
            38 => Op::HoldPart { namespace, tokens: self.tokens(), page: i },
            39 => Op::SwapOut(i),
            40 => Op::SwapIn { swapped: i, fails_at: self.below(8) },
            _ if self.below(200) == 0 => Op::Clear,
            _ => Op::Evict(n),
        }
    }
}

/// A million operations by default; SUANPAN_CACHE_OPS asks for another number.
#[test]
fn long_run_of_random_operations_leaks_nothing() {
    let ops = std::env::var("SUANPAN_CACHE_OPS").ok().and_then(|s| s.parse().ok()).unwrap_or(1_000_000usize);
    let mut random = Random(2);
    for policy in EvictionPolicy::ALL {
        // The policy in use has most of the operations.
        let ops = if policy == EvictionPolicy::Lru { ops - ops / 5 * 2 } else { ops / 5 };
        let mut world = World::new(20, policy);
        for _ in 0..ops {
            world.apply(&random.op());
        }
        let seen = world.seen;
        let least = [seen.hit_pages, seen.partial_hits, seen.copies, seen.evicted_pages];
        let rare = [
            seen.duplicate_pages,
            seen.refused_reservations,
            seen.preemptions,
            seen.swapped_in,
            seen.failed_copies,
        ];
        assert!(least.iter().all(|&n| n > ops / 200) && rare.iter().all(|&n| n > ops / 2000), "{seen:?}");
        assert!(seen.forgotten_pages > ops / 100_000, "{seen:?}");
        world.finish();
    }
}
