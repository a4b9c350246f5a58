//! Any bytes as a config.json. A config that is accepted passes its own checks and gives usable frequencies.
#![no_main]

use libfuzzer_sys::fuzz_target;
use suanpan_model::config_json::{apply_generation_config, config};
use suanpan_model::rope::inv_freq;

fuzz_target!(|data: &[u8]| {
    let Ok(mut config) = config("config.json", data, "fuzz") else { return };
    assert!(config.check().is_ok());
    if config.rotary_dim <= 4096 {
        for rope in &config.ropes {
            let freq = inv_freq(rope, config.rotary_dim, config.max_position_embeddings);
            assert!(freq.len() == config.rotary_dim / 2 && freq.iter().all(|f| f.is_finite() && *f >= 0.0));
        }
    }
    let _ = apply_generation_config(&mut config, "generation_config.json", data);
});
