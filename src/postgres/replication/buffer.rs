//! A buffer of bytes that were read but not yet consumed. Does not perform I/O.

/// Minimum free space in a buffer before a read from the socket. The walsender sends one row at a
/// time, but a read returns all rows that have accumulated.
pub(super) const READ_BYTES: usize = 128 << 10;
/// Size of the free space at the beginning of a chunk. If the previous buffer ends in the middle of
/// a message, the beginning of that message is copied into this space.
const HEAD_BYTES: usize = 16 << 10;
/// Minimum size of a buffer. A buffer has to grow only for large messages.
const CHUNK_BYTES: usize = HEAD_BYTES + READ_BYTES;
/// A buffer larger than this is freed once it is empty.
const LARGE_BYTES: usize = 1 << 20;

/// A buffer whose unread bytes are `bytes[start..end]`. All of `bytes` is initialized when it is
/// allocated, because reads require an initialized slice.
#[derive(Default)]
pub(super) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Buffer {
    /// Creates a buffer that contains these bytes.
    pub(super) fn from_unread(unread: &[u8]) -> Self {
        Self {
            bytes: unread.to_vec(),
            start: 0,
            end: unread.len(),
        }
    }

    /// Turns this buffer into an empty chunk, reusing its memory. [`Buffer::append_chunk`] can
    /// later append the chunk to another buffer.
    pub(super) fn into_chunk(mut self) -> Self {
        if self.bytes.len() != CHUNK_BYTES {
            self.bytes = vec![0; CHUNK_BYTES];
        }
        (self.start, self.end) = (HEAD_BYTES, HEAD_BYTES);
        self
    }

    pub(super) fn unread(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// Returns the size of the allocated memory in bytes.
    #[cfg(any(test, fuzzing))]
    pub(super) fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.start += count;
        assert!(
            self.start <= self.end,
            "consumed more bytes than were unread: {} > {}",
            self.start,
            self.end
        );
    }

    /// Returns space to read into: at least [`READ_BYTES`] and at least `missing` bytes. After
    /// reading, call [`Buffer::filled`] with the number of bytes read.
    pub(super) fn space_for(&mut self, missing: usize) -> &mut [u8] {
        let needed = missing.max(READ_BYTES);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > LARGE_BYTES {
                self.bytes = Vec::new();
            }
        }
        if self.bytes.len() - self.end < needed {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let len = (self.end + needed).max(CHUNK_BYTES);
            let more = len.saturating_sub(self.bytes.len());
            self.bytes.reserve_exact(more);
            self.bytes.resize(self.bytes.len() + more, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// Returns the remaining space in a chunk.
    pub(super) fn remaining_space(&mut self) -> &mut [u8] {
        &mut self.bytes[self.end..]
    }

    /// Records that `count` bytes were read into the buffer's space.
    pub(super) fn filled(&mut self, count: usize) {
        self.end += count;
        assert!(
            self.end <= self.bytes.len(),
            "read more bytes than the available space can hold"
        );
    }

    /// Appends a chunk's bytes, and returns a buffer that is no longer needed and can be reused.
    /// `missing` is the number of bytes of the current message that have not been read yet.
    pub(super) fn append_chunk(&mut self, mut chunk: Self, missing: usize) -> Self {
        let unread = self.unread();
        if unread.len() <= chunk.start {
            let start = chunk.start - unread.len();
            chunk.bytes[start..chunk.start].copy_from_slice(unread);
            chunk.start = start;
            return std::mem::replace(self, chunk);
        }
        let behind = chunk.unread();
        self.space_for(missing.max(behind.len()))[..behind.len()].copy_from_slice(behind);
        self.filled(behind.len());
        chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(buffer: &mut Buffer, bytes: &[u8], missing: usize) {
        let room = buffer.space_for(missing);
        assert!(room.len() >= missing.max(READ_BYTES));
        room[..bytes.len()].copy_from_slice(bytes);
        buffer.filled(bytes.len());
    }

    fn chunk(bytes: &[u8], memory: Buffer) -> Buffer {
        let mut chunk = memory.into_chunk();
        assert!(chunk.unread().is_empty());
        chunk.remaining_space()[..bytes.len()].copy_from_slice(bytes);
        chunk.filled(bytes.len());
        chunk
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn returns_bytes_unchanged_and_in_order(
            steps in proptest::collection::vec((0..40_000_usize, any::<bool>(), 0..3_usize, 0..200_000_usize), 1..60),
        ) {
            let mut buffer = Buffer::from_unread(b"");
            let mut memory = Buffer::default();
            let mut endless = (0..=250_u8).cycle();
            let mut expected = std::collections::VecDeque::new();
            for (count, is_chunk, consumed, missing) in steps {
                let bytes: Vec<u8> = endless.by_ref().take(count).collect();
                expected.extend(bytes.iter().copied());
                if is_chunk {
                    memory = buffer.append_chunk(chunk(&bytes, memory), missing);
                } else {
                    read(&mut buffer, &bytes, missing);
                }
                prop_assert!(buffer.unread().iter().eq(&expected));
                // Consume all bytes of the buffer, half of them, or none.
                let consumed = expected.len() * consumed / 2;
                buffer.consume(consumed);
                expected.drain(..consumed);
                prop_assert!(buffer.unread().iter().eq(&expected));
            }
        }
    }

    #[test]
    fn appending_a_chunk_moves_only_the_beginning_of_a_message() {
        let mut buffer = Buffer::from_unread(&[1; HEAD_BYTES]);
        let second = chunk(&[2; 10], Buffer::default());
        let place = second.bytes.as_ptr();
        let spare = buffer.append_chunk(second, 0);
        assert_eq!(spare.bytes.len(), HEAD_BYTES);
        assert_eq!(buffer.bytes.as_ptr(), place);
        assert_eq!(buffer.unread(), [&[1; HEAD_BYTES][..], &[2; 10]].concat());
        // The buffer contains one unread byte more than fits into the free space at the beginning
        // of the chunk.
        let mut buffer = Buffer::from_unread(&[1; HEAD_BYTES + 1]);
        let spare = buffer.append_chunk(chunk(&[2; 10], spare), 0);
        assert_eq!(spare.bytes.len(), CHUNK_BYTES);
        assert_eq!(
            buffer.unread(),
            [&[1; HEAD_BYTES + 1][..], &[2; 10]].concat()
        );
    }

    #[test]
    fn allocates_no_memory_for_small_messages() {
        let mut buffer = Buffer::from_unread(b"");
        read(&mut buffer, b"x", 1);
        let place = buffer.bytes.as_ptr();
        read(&mut buffer, &[1; HEAD_BYTES - 1], 1);
        buffer.space_for(1);
        assert_eq!(buffer.bytes.as_ptr(), place);
        assert_eq!(buffer.capacity(), CHUNK_BYTES);
    }

    #[test]
    fn frees_the_memory_of_a_large_message() {
        let mut buffer = Buffer::from_unread(b"");
        let held = [&[1; READ_BYTES][..], b"x"].concat();
        read(&mut buffer, &held[..READ_BYTES], 1);
        read(&mut buffer, b"x", 10 << 20);
        assert_eq!(buffer.capacity(), READ_BYTES + (10 << 20));
        assert_eq!(buffer.unread(), held);
        buffer.consume(READ_BYTES);
        read(&mut buffer, b"y", 1);
        assert_eq!(buffer.unread(), b"xy");
        buffer.consume(2);
        buffer.space_for(1);
        assert_eq!(buffer.capacity(), CHUNK_BYTES);
        // A buffer whose size is at the limit is kept.
        buffer.space_for(LARGE_BYTES);
        buffer.space_for(1);
        assert_eq!(buffer.capacity(), LARGE_BYTES);
        let place = buffer.bytes.as_ptr();
        read(&mut buffer, b"z", 1);
        buffer.consume(1);
        buffer.space_for(READ_BYTES);
        assert_eq!(buffer.bytes.as_ptr(), place);
    }
}
