//! Random problems against the oracle. A failure prints its case as one line that reproduces it.

mod common;
use common::random::{case, config};
use common::*;
use proptest::prelude::*;
use suanpan_attn::{Isa, Machine};

proptest! {
    #![proptest_config(config(200))]
    #[test]
    fn random_problems_agree_with_the_oracle(c in case((50, 600)), isa in 0usize..4, threads in 1usize..4) {
        let data = Data::random(&c);
        let machine = Machine::forced(Isa::ALL[isa], threads).unwrap_or(Machine::detect(threads));
        judge(&c, &data, &run_case(&c, &data, &machine, f32::NAN));
    }
}
