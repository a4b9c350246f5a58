//! Objects as files of one folder: written beside their place and renamed into it, so that a process killed at any point leaves whole
//! objects and rubbish that the next start removes.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Digest, Store};

/// A folder of pages. Any number of processes may use one folder.
pub struct DiskStore {
    folder: PathBuf,
    next: AtomicU64,
}

const PART: &str = "part";

impl DiskStore {
    /// Opens the folder, making it where it is missing, and removes what a killed process left unfinished.
    pub fn open(folder: &Path) -> io::Result<DiskStore> {
        fs::create_dir_all(folder)?;
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let unfinished = path.extension().is_some_and(|e| e == PART);
            if unfinished && !in_use(&path) {
                // Another process may have been faster.
                fs::remove_file(&path).ok();
            }
        }
        Ok(DiskStore { folder: folder.to_owned(), next: AtomicU64::new(0) })
    }

    fn path(&self, name: &Digest) -> PathBuf {
        self.folder.join(blake3::Hash::from(*name).to_hex().as_str())
    }
}

/// Whether the process that writes this file, which carries its id, still lives. Where that cannot be told, it does.
fn in_use(path: &Path) -> bool {
    let pid = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.split('-').next());
    let Some(pid) = pid.and_then(|p| p.parse::<u32>().ok()) else { return false };
    pid != std::process::id()
        && (!Path::new("/proc/self").exists() || Path::new(&format!("/proc/{pid}")).exists())
}

/// A secret of 32 bytes that stays with a folder: read there, or drawn and kept there for its owner alone. Without a folder, one that
/// nobody keeps.
pub fn folder_secret(folder: Option<&Path>) -> io::Result<[u8; 32]> {
    let Some(folder) = folder else { return Ok(draw_secret()) };
    fs::create_dir_all(folder)?;
    let path = folder.join("secret");
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    match options.open(&path) {
        Ok(mut file) => {
            let secret = draw_secret();
            file.write_all(&secret)?;
            Ok(secret)
        }
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            let kept = fs::read(&path)?;
            kept.try_into().map_err(|_| io::Error::other("the file `secret` is not 32 bytes: remove it"))
        }
        Err(e) => Err(e),
    }
}

/// From the keys with which the standard library guards its tables, drawn from the system.
fn draw_secret() -> [u8; 32] {
    let mut hash = blake3::Hasher::new_derive_key("suanpan folder secret 1");
    for i in 0..4u8 {
        hash.update(&std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), i).to_le_bytes());
    }
    *hash.finalize().as_bytes()
}

impl Store for DiskStore {
    fn read(&self, name: &Digest) -> io::Result<Vec<u8>> {
        fs::read(self.path(name))
    }

    fn write(&self, name: &Digest, object: &[u8]) -> io::Result<()> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let part = self.folder.join(format!("{}-{number}.{PART}", std::process::id()));
        let written = fs::File::create(&part)
            .and_then(|mut file| file.write_all(object))
            .and_then(|()| fs::rename(&part, self.path(name)));
        if written.is_err() {
            fs::remove_file(&part).ok();
        }
        written
    }

    fn remove(&self, name: &Digest) -> io::Result<()> {
        match fs::remove_file(self.path(name)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    fn list(&self) -> io::Result<Vec<(Digest, u64)>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().and_then(|n| blake3::Hash::from_hex(n).ok()) else {
                continue;
            };
            // One that another process removed meanwhile is not there.
            let Ok(about) = entry.metadata() else { continue };
            all.push((about.modified()?, *name.as_bytes(), about.len()));
        }
        all.sort_unstable();
        Ok(all.into_iter().map(|(_, name, bytes)| (name, bytes)).collect())
    }
}
