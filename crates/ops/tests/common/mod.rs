//! Deterministic noise, shared by the integration tests.

/// A linear congruential generator.
pub struct Noise(pub u64);

impl Noise {
    /// 31 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// −1..1.
    pub fn unit(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 30) as f32 - 1.0
    }
}
