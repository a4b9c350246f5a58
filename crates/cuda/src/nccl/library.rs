//! The library: where it is found, whether it is one that the structs here fit, and its functions.
use super::Error;
use std::ffi::{CStr, OsString, c_char, c_int, c_void};
use std::fmt;
use std::sync::Arc;

/// Names the file to load. Then no other is tried: a wrong name is an error.
pub const ENV: &str = "SUANPAN_NCCL_LIBRARY";

/// What the system's loader is asked for. Packages of NCCL install the first; the second comes with headers for developers.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// An NCCL release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 2.
    pub major: i32,
    /// 17 of 2.17.1.
    pub minor: i32,
    /// 1 of 2.17.1.
    pub patch: i32,
}

impl Version {
    /// The first whose configuration has the fields that are passed here; later ones take it as it is.
    pub const LEAST: Version = Version { major: 2, minor: 17, patch: 0 };

    /// From the code that `ncclGetVersion` gives: 10,000 a major release since 2.9, 1,000 before.
    fn from_code(code: c_int) -> Version {
        let unit = if code < 10_000 { 1_000 } else { 10_000 };
        Version { major: code / unit, minor: code % unit / 100, patch: code % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// `ncclComm_t` and `cudaStream_t`.
pub(super) type Handle = *mut c_void;

/// `ncclResult_t`.
pub(super) type Code = c_int;
pub(super) const SUCCESS: Code = 0;
pub(super) const IN_PROGRESS: Code = 7;

/// `ncclUint8`: messages are counted in bytes.
pub(super) const BYTES: c_int = 1;

/// What the ranks of one communicator have in common: made by one of them, and brought to the others by other means.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl fmt::Debug for UniqueId {
    /// Whoever has it can join: not for logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(..)")
    }
}

/// `ncclConfig_t` of 2.17.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
}

impl Config {
    pub fn non_blocking() -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cga_cluster_size: c_int::MIN, // "undefined": NCCL chooses
            min_ctas: c_int::MIN,
            max_ctas: c_int::MIN,
            net_name: std::ptr::null(),
        }
    }
}

macro_rules! functions {
    ($($name:ident = $symbol:literal: $kind:ty;)*) => {
        /// NCCL's functions, by their signatures in its header.
        #[derive(Clone, Copy)]
        pub(super) struct Functions {
            $(pub $name: $kind,)*
        }

        impl Functions {
            /// # Safety
            /// Where `library` has these symbols, they are NCCL's.
            unsafe fn load(library: &libloading::Library, file: &str) -> Result<Functions, Error> {
                $(
                    // SAFETY: the caller vouches for the symbol's type.
                    let $name = unsafe { library.get::<$kind>($symbol) };
                    let $name = *$name.map_err(|_| Error::NoSymbol { file: file.into(), symbol: $symbol })?;
                )*
                Ok(Functions { $($name,)* })
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": unsafe extern "C" fn(*mut c_int) -> Code;
    get_unique_id = "ncclGetUniqueId": unsafe extern "C" fn(*mut UniqueId) -> Code;
    init_rank = "ncclCommInitRankConfig": unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> Code;
    finalize = "ncclCommFinalize": unsafe extern "C" fn(Handle) -> Code;
    destroy = "ncclCommDestroy": unsafe extern "C" fn(Handle) -> Code;
    abort = "ncclCommAbort": unsafe extern "C" fn(Handle) -> Code;
    async_error = "ncclCommGetAsyncError": unsafe extern "C" fn(Handle, *mut Code) -> Code;
    error_string = "ncclGetErrorString": unsafe extern "C" fn(Code) -> *const c_char;
    last_error = "ncclGetLastError": unsafe extern "C" fn(Handle) -> *const c_char;
    group_start = "ncclGroupStart": unsafe extern "C" fn() -> Code;
    group_end = "ncclGroupEnd": unsafe extern "C" fn() -> Code;
    send = "ncclSend": unsafe extern "C" fn(*const c_void, usize, c_int, c_int, Handle, Handle) -> Code;
    recv = "ncclRecv": unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, Handle, Handle) -> Code;
    all_gather = "ncclAllGather": unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, Handle) -> Code;
}

/// A loaded NCCL. It stays loaded as long as the process: it has threads of its own.
#[derive(Clone)]
pub struct Library {
    pub(super) functions: Functions,
    version: Version,
    file: Arc<str>,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} of {}", self.version, self.file)
    }
}

impl Library {
    /// The file that [`ENV`] names, or what the system's loader finds.
    pub fn open() -> Result<Library, Error> {
        Library::find(std::env::var_os(ENV))
    }

    /// The file `named`, or what the system's loader finds.
    pub fn find(named: Option<OsString>) -> Result<Library, Error> {
        let names = named.map_or_else(|| NAMES.map(OsString::from).to_vec(), |name| vec![name]);
        let mut tried = Vec::new();
        for name in names {
            // SAFETY: loading runs the file's own start-up code, as every program does that links to it; whoever names it trusts it.
            match unsafe { libloading::Library::new(&name) } {
                Ok(library) => {
                    let file = name.to_string_lossy();
                    // SAFETY: a file with all of these names is NCCL.
                    let functions = unsafe { Functions::load(&library, &file) };
                    std::mem::forget(library);
                    return Library::new(functions?, &file);
                }
                Err(error) => {
                    // The loader's own words are the error's source.
                    let cause =
                        std::error::Error::source(&error).map_or(error.to_string(), |s| s.to_string());
                    tried.push(format!("{}: {cause}", name.to_string_lossy()));
                }
            }
        }
        Err(Error::NoLibrary { tried: tried.join("; ") })
    }

    /// Refuses versions that do not know the structs here.
    pub(super) fn new(functions: Functions, file: &str) -> Result<Library, Error> {
        let mut code = 0;
        // SAFETY: the call only fills `code`.
        let answer = unsafe { (functions.get_version)(&mut code) };
        let version = Version::from_code(if answer == SUCCESS { code } else { 0 });
        if version < Version::LEAST {
            return Err(Error::TooOld { file: file.into(), version });
        }
        Ok(Library { functions, version, file: file.into() })
    }

    /// Its release.
    pub fn version(&self) -> Version {
        self.version
    }

    /// What it was loaded from.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// A new communicator's name. NCCL listens on a port from now on, until the process ends.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the call only fills `id`.
        match unsafe { (self.functions.get_unique_id)(&mut id) } {
            SUCCESS => Ok(id),
            code => Err(Error::Failed {
                place: super::Place { rank: 0, world: 1 },
                call: "ncclGetUniqueId",
                reason: self.reason(code, std::ptr::null_mut()),
            }),
        }
    }

    /// NCCL's words for `code`, and for what happened last in `comm` (or, where it is null, anywhere).
    pub(super) fn reason(&self, code: Code, comm: Handle) -> String {
        // SAFETY: both calls return strings of NCCL's, or null.
        let pointers = unsafe { [(self.functions.error_string)(code), (self.functions.last_error)(comm)] };
        let words = pointers.into_iter().filter(|p| !p.is_null()).map(|p| {
            // SAFETY: a string that ends with a NUL, and is copied at once.
            unsafe { CStr::from_ptr(p) }.to_string_lossy().trim().to_string()
        });
        let words: Vec<String> = words.filter(|w| !w.is_empty()).collect();
        if words.is_empty() { format!("code {code}") } else { words.join(": ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_named_file_that_is_not_there_is_an_error_that_names_it_and_nothing_else_is_tried() {
        let error = Library::find(Some("/nowhere/libnccl.so.2".into())).unwrap_err();
        let Error::NoLibrary { tried } = &error else { panic!("{error}") };
        assert!(tried.contains("/nowhere/libnccl.so.2") && !tried.contains("; "), "{tried}");
        assert!(error.to_string().contains(ENV), "{error}");
    }

    #[test]
    fn a_library_that_is_not_nccl_is_refused_by_the_missing_name() {
        let error = Library::find(Some("libc.so.6".into())).unwrap_err();
        assert_eq!(error, Error::NoSymbol { file: "libc.so.6".into(), symbol: "ncclGetVersion" });
    }

    #[test]
    fn versions_are_read_in_both_codings() {
        let version = |major, minor, patch| Version { major, minor, patch };
        assert_eq!(Version::from_code(2_708), version(2, 7, 8));
        assert_eq!(Version::from_code(20_905), version(2, 9, 5));
        assert_eq!(Version::from_code(23_203), version(2, 32, 3));
        assert!(Version::from_code(21_602) < Version::LEAST && Version::from_code(21_700) == Version::LEAST);
    }
}
