//! Any bytes as a config.json. A config that is accepted passes its own checks and gives usable frequencies.
#![no_main]

use libfuzzer_sys::fuzz_target;
use suanpan_model::config_json::{apply_generation_config, config};
use suanpan_model::rope::inv_freq;

fuzz_target!(|data: &[u8]| {
    let Ok(mut config) = config("config.json", data, "fuzz") else { return };
    assert!(config.check().is_ok());
    if config.heads.head_dim_qk <= 4096 {
        assert_eq!(inv_freq(&config.rope, config.heads.head_dim_qk).len(), config.heads.head_dim_qk / 2);
    }
    let _ = apply_generation_config(&mut config, "generation_config.json", data);
});
