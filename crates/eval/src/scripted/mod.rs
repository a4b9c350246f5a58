//! Endpoints with known answers, known delays and known faults, reached through real HTTP: the harness is held against them.
//!
//! No part of a measurement: a server of a few threads on the loopback, for tests and for `suanpan eval self-test`.

pub mod faults;
pub mod minds;
pub mod self_test;
pub mod server;
pub mod timers;
