//! Any bytes as a safetensors file. A header that is accepted must place every tensor inside the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use suanpan_model::safetensors::SafeTensors;
use suanpan_model::source::Source;

fuzz_target!(|data: &[u8]| {
    let Ok(file) = SafeTensors::parse(Source::owned("fuzz.safetensors", data.to_vec())) else { return };
    for name in file.tensor_names() {
        let info = file.tensor_info(name).expect("a listed tensor is there");
        assert!(info.bytes.start <= info.bytes.end && info.bytes.end <= data.len());
        if let Ok(tensor) = file.tensor(name, &info.shape) {
            assert_eq!(tensor.to_f32().len(), tensor.rows() * tensor.cols());
        }
    }
});
