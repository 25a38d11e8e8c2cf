//! Files in the process's address space.

use std::fs::File;
use std::io;
use std::ops::Range;

/// Whether weights may be used where their file lies in memory, instead of being copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Mapping {
    /// Where it is known to be good: on devices that say they can use host memory in place, for files on a local disk.
    #[default]
    Auto,
    /// Never: files are read.
    Never,
    /// Wherever a device turns out to be able to, also if it does not say so. What cannot be mapped is read.
    Always,
}

impl std::str::FromStr for Mapping {
    type Err = String;

    /// `auto`, `never` or `always`, in any case.
    fn from_str(text: &str) -> Result<Mapping, String> {
        match text.trim().to_lowercase().as_str() {
            "auto" => Ok(Mapping::Auto),
            "never" => Ok(Mapping::Never),
            "always" => Ok(Mapping::Always),
            _ => Err(format!("`{text}` is none of auto, never, always")),
        }
    }
}

/// What a mapping's pages may be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Access {
    /// Reading.
    #[default]
    ReadOnly,
    /// Reading, and writing that only this mapping sees: pages that are written become the process's own.
    PrivateWritable,
}

/// What to tell the operating system about the way a mapping is going to be read. Only a hint: it changes nothing else,
/// and systems that do not know it ignore it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum AccessHint {
    /// Nothing.
    #[default]
    None,
    /// From the beginning to the end: read far ahead.
    Sequential,
    /// In no order: do not read ahead.
    Random,
    /// All of it, soon: begin to read now.
    WillNeed,
    /// All of it, now: every page is brought in before the mapping is returned (Linux).
    Populate,
}

/// How a file is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct MapOptions {
    /// What the pages may be used for.
    pub access: Access,
    /// How they are going to be read.
    pub hint: AccessHint,
}

impl MapOptions {
    /// Sets what the pages may be used for.
    #[must_use]
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Sets how the pages are going to be read.
    #[must_use]
    pub fn hint(mut self, hint: AccessHint) -> Self {
        self.hint = hint;
        self
    }
}

/// A whole file, mapped into the address space until it is dropped.
///
/// The bytes are handed out as an address only, never as a slice: another process may change the file meanwhile, and a
/// slice promises that nobody does. Whoever shortens a mapped file takes pages away that a computation may be reading,
/// and the operating system ends the process for that; use [`Mapping::Never`] for files that others may cut.
#[derive(Debug)]
pub struct MappedFile {
    pages: Pages,
    length: u64,
}

#[derive(Debug)]
enum Pages {
    ReadOnly(memmap2::Mmap),
    Private(memmap2::MmapMut),
}

impl MappedFile {
    /// Maps `file`, which must hold at least the `needed` bytes that its index speaks of.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] if the file is shorter than `needed`, [`io::ErrorKind::InvalidInput`] if it is
    /// empty or larger than the address space, or what the operating system says.
    pub fn open(file: &File, needed: u64, options: MapOptions) -> io::Result<MappedFile> {
        let length = file.metadata()?.len();
        if length < needed {
            let reason = format!("the file has {length} bytes where {needed} are needed");
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
        }
        if length == 0 || usize::try_from(length).is_err() {
            let reason = format!("a file of {length} bytes cannot be mapped");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let mut how = memmap2::MmapOptions::new();
        if options.hint == AccessHint::Populate {
            how.populate();
        }
        // SAFETY: what a change of the file by others could break is a promise about slices, and none is ever made of
        // these pages: they are read through raw pointers, as numbers of which every pattern is valid.
        let pages = unsafe {
            match options.access {
                Access::ReadOnly => Pages::ReadOnly(how.map(file)?),
                Access::PrivateWritable => Pages::Private(how.map_copy(file)?),
            }
        };
        let mapped = MappedFile { pages, length };
        mapped.advise(options.hint);
        Ok(mapped)
    }

    /// Bytes of the file when it was mapped.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Always false: an empty file cannot be mapped.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Whether nobody, this process included, can write through this mapping.
    pub fn is_read_only(&self) -> bool {
        matches!(self.pages, Pages::ReadOnly(_))
    }

    /// The address of the first byte; valid, with [`MappedFile::len`] bytes and zeros to the end of the last page, as
    /// long as `self`. Aligned to a page.
    pub fn as_ptr(&self) -> *const u8 {
        match &self.pages {
            Pages::ReadOnly(pages) => pages.as_ptr(),
            Pages::Private(pages) => pages.as_ptr(),
        }
    }

    /// Bytes from the first to the end of the last page.
    pub fn mapped_len(&self) -> u64 {
        pages(self.length)
    }

    /// Copies the bytes of the file in `range` into `into`; `None` if they are not as many, or not all in the file.
    pub fn read(&self, range: Range<u64>, into: &mut [u8]) -> Option<()> {
        let inside = range.start <= range.end && range.end <= self.length;
        if !inside || range.end - range.start != into.len() as u64 {
            return None;
        }
        // SAFETY: the range was just found to lie in the mapping, and `into` to be as long; nobody else has `into`.
        unsafe {
            self.as_ptr()
                .add(range.start as usize)
                .copy_to_nonoverlapping(into.as_mut_ptr(), into.len());
        }
        Some(())
    }

    #[cfg(unix)]
    fn advise(&self, hint: AccessHint) {
        use memmap2::Advice;
        let advice = match hint {
            AccessHint::None | AccessHint::Populate => return,
            AccessHint::Sequential => Advice::Sequential,
            AccessHint::Random => Advice::Random,
            AccessHint::WillNeed => Advice::WillNeed,
        };
        let done = match &self.pages {
            Pages::ReadOnly(pages) => pages.advise(advice),
            Pages::Private(pages) => pages.advise(advice),
        };
        if let Err(error) = done {
            tracing::debug!("the hint {hint:?} was not taken: {error}");
        }
    }

    #[cfg(not(unix))]
    fn advise(&self, _hint: AccessHint) {}
}

/// Bytes of the pages that a file of `length` bytes takes when it is mapped.
pub fn pages(length: u64) -> u64 {
    length.next_multiple_of(page_size())
}

/// Bytes of a page of memory, what mappings are counted in.
pub(crate) fn page_size() -> u64 {
    #[cfg(unix)]
    return rustix::param::page_size() as u64;
    // Views of files on Windows begin at multiples of 64 KiB, but end at pages of 4.
    #[cfg(not(unix))]
    return 4096;
}

/// Whether `file` lies on a disk of this machine, as far as can be told: pages of a file on another machine may be gone
/// when they are touched, which no error can be made of.
pub fn is_local(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    {
        /// Numbers of network file systems in `statfs(2)` and the kernel's `magic.h`: NFS, SMB, SMB2, CIFS, AFS, Coda,
        /// 9P, Ceph, FUSE (which may be anything), Lustre, GFS2, OCFS2.
        const REMOTE: [u32; 12] = [
            0x6969,
            0x517b,
            0xfe53_4d42,
            0xff53_4d42,
            0x5346_414f,
            0x7375_7245,
            0x0102_1997,
            0x00c3_6400,
            0x6573_5546,
            0x0bd0_0bd0,
            0x0116_1970,
            0x7461_636f,
        ];
        rustix::fs::fstatfs(file).is_ok_and(|found| !REMOTE.contains(&(found.f_type as u32)))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        cfg!(unix)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn a_file_is_read_where_it_lies() {
        let bytes: Vec<u8> = (0..10_000_u32).map(|n| n as u8).collect();
        let file = file(&bytes);
        for hint in [
            AccessHint::None,
            AccessHint::Sequential,
            AccessHint::Random,
            AccessHint::WillNeed,
            AccessHint::Populate,
        ] {
            for access in [Access::ReadOnly, Access::PrivateWritable] {
                let options = MapOptions::default().hint(hint).access(access);
                let mapped = MappedFile::open(&file, 10_000, options).unwrap();
                assert_eq!(mapped.len(), 10_000);
                assert!(!mapped.is_empty());
                assert_eq!(mapped.mapped_len() % page_size(), 0);
                assert_eq!(mapped.is_read_only(), access == Access::ReadOnly);
                assert_eq!(mapped.as_ptr() as u64 % page_size(), 0);
                let mut part = [0; 100];
                mapped.read(9_900..10_000, &mut part).unwrap();
                assert_eq!(part, bytes[9_900..]);
                assert_eq!(mapped.read(9_901..10_001, &mut part), None);
                assert_eq!(mapped.read(0..99, &mut part), None);
                #[expect(clippy::reversed_empty_ranges)]
                let backwards = mapped.read(100..0, &mut part);
                assert_eq!(backwards, None);
            }
        }
    }

    #[test]
    fn what_cannot_be_mapped_says_why() {
        let kind = |bytes: &[u8], needed| {
            MappedFile::open(&file(bytes), needed, MapOptions::default())
                .unwrap_err()
                .kind()
        };
        assert_eq!(kind(&[1; 10], 11), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(&[], 0), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_temporary_file_is_local() {
        assert!(is_local(&file(&[1])));
        assert_eq!("Always".parse(), Ok(Mapping::Always));
        assert!("on".parse::<Mapping>().unwrap_err().contains("never"));
    }
}
