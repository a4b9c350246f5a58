//! What a thread reads next, asked for while it works: with one input row a product takes as long as memory does, if that never rests.
//!
//! Unpacking walks 16 rows at once, which no processor's own guesses follow, and none guesses past a system page. So the next tile of a
//! thread is asked for a few lines a block, into the second-level cache. Measured on a Zen 4 with two threads, 178 MB of Q8_0 out of the
//! file's pages, one row of two digits (one digit): 4.2 ms (4.0), 7.9 (6.1) into the first level, which keeps 24 misses in flight and no
//! more, 10.3 (10.0) for a plain read of a tile before it is unpacked. The same work on cached bytes takes 3.4.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Bytes to ask for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    at: *const u8,
    lines: usize,
}

impl Ahead {
    /// All lines of `bytes`.
    pub fn over(bytes: &[u8]) -> Ahead {
        Ahead { at: bytes.as_ptr(), lines: bytes.len().div_ceil(LINE) }
    }

    /// Lines to ask for at each of `steps` steps, to have asked for all at their end.
    #[inline(always)]
    pub fn share(&self, steps: usize) -> usize {
        self.lines.div_ceil(steps.max(1))
    }

    /// Asks for the next `lines` lines, or as many as are left.
    #[inline(always)]
    pub fn ask(&mut self, lines: usize) {
        let now = lines.min(self.lines);
        for _ in 0..now {
            fetch(self.at);
            self.at = self.at.wrapping_add(LINE);
        }
        self.lines -= now;
    }

    /// Asks for all that is left.
    #[inline(always)]
    pub fn ask_all(mut self) {
        self.ask(self.lines);
    }
}

/// Asks for one line into the second-level cache. Touches nothing: any address will do.
#[inline(always)]
fn fetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of every x86-64; a prefetch never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(line.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch never faults.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{0}]", in(reg) line, options(nostack, preserves_flags, readonly))
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}
