//! Memory whose addresses captured graphs contain, kept as long as such a graph exists.

use crate::base::error::Result;
use crate::cuda::device::Stream;
use crate::cuda::graph::GraphReaders;

/// Memory by its owners (`T`), each with the graphs that read or write it.
#[derive(Debug)]
pub struct GraphMemory<T> {
    /// The newest at the end.
    list: Vec<(T, GraphReaders)>,
}

impl<T> Default for GraphMemory<T> {
    fn default() -> Self {
        Self { list: Vec::new() }
    }
}

impl<T> GraphMemory<T> {
    /// The memory for which `is` returns true.
    #[must_use]
    pub fn find(&self, is: impl Fn(&T) -> bool) -> Option<&T> {
        self.list.iter().map(|(memory, _)| memory).find(|memory| is(memory))
    }

    /// Notes that the graph under `capture`, if there is one, uses the memory for which `is` returns true; false if
    /// there is no such memory.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn note(&self, is: impl Fn(&T) -> bool, capture: Option<Stream>) -> Result<bool> {
        let Some((_, readers)) = self.list.iter().find(|(memory, _)| is(memory)) else { return Ok(false) };
        capture.map_or(Ok(()), |stream| readers.add(stream))?;
        Ok(true)
    }

    /// Keeps memory for the graph under `capture`, if there is one.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn keep(&mut self, memory: T, capture: Option<Stream>) -> Result<()> {
        let readers = GraphReaders::default();
        capture.map_or(Ok(()), |stream| readers.add(stream))?;
        self.list.push((memory, readers));
        Ok(())
    }

    /// Removes memory that no graph uses any longer, except the `spare` newest. Its drop may run foreign code, so drop
    /// it when nothing is borrowed.
    #[must_use]
    pub fn release(&mut self, spare: usize) -> Vec<T> {
        let unused = self.list.iter().filter(|(_, readers)| !readers.exist()).count();
        let mut released = Vec::new();
        let mut at = 0;
        while released.len() + spare < unused {
            if self.list[at].1.exist() {
                at += 1;
            } else {
                released.push(self.list.remove(at).0);
            }
        }
        released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_graph_uses_is_released_the_oldest_first() -> Result<()> {
        let mut memory = GraphMemory::default();
        for number in 0..5 {
            memory.keep(number, None)?;
        }
        assert!(memory.note(|&number| number == 1, None)? && !memory.note(|&number| number == 7, None)?);
        assert_eq!(memory.release(3), [0, 1]);
        assert_eq!((memory.find(|&number| number == 1), memory.find(|&number| number == 2)), (None, Some(&2)));
        assert_eq!(memory.release(0), [2, 3, 4]);
        assert!(memory.release(0).is_empty());
        Ok(())
    }
}
