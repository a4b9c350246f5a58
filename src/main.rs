//! suanpan
fn main() {}
