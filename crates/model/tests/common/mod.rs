//! Shared by the executor's tests: a driver that owns pages, and a plain transformer to compare with.

#![allow(dead_code)] // each test binary uses its part

pub mod driver;
pub mod plain;
pub mod random;
pub mod words;
