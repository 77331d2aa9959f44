//! The compiled programs that a chain keeps between calls, each with the row counts that it was sized for.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::base::error::Result;
use crate::program::compiled::Program;
use crate::program::sized::SizedProgram;
use crate::runtime::dispatcher::Dispatcher;

/// Programs of one chain that are kept.
const PROGRAMS: usize = 64;
/// Row counts of one program that are kept.
const ROW_COUNTS: usize = 256;

/// The compiled programs of one chain, with the caller's data for each (`C`). The owner of the chain owns them, so that
/// a call finds its program without a lock.
#[derive(Debug)]
pub struct ProgramCache<C> {
    /// In order of use; the last used one is at the end.
    kept: Vec<KeptProgram<C>>,
}

impl<C> Default for ProgramCache<C> {
    fn default() -> Self {
        Self { kept: Vec::new() }
    }
}

impl<C: AsRef<Program>> ProgramCache<C> {
    /// The program that `fits`.
    #[inline]
    pub fn find(&mut self, fits: impl Fn(&Program) -> bool) -> Option<&mut KeptProgram<C>> {
        let index = self.kept.iter().rposition(|kept| fits((*kept.compiled).as_ref()))?;
        if index + 1 != self.kept.len() {
            self.kept[index..].rotate_left(1);
        }
        self.kept.last_mut()
    }

    /// Keeps a program; returns it, and the least recently used one if it is evicted.
    pub fn insert(&mut self, compiled: Arc<C>) -> (&mut KeptProgram<C>, Option<Arc<C>>) {
        let former = (self.kept.len() >= PROGRAMS).then(|| self.kept.remove(0).compiled);
        let at = self.kept.len();
        self.kept.push(KeptProgram::new(compiled));
        (&mut self.kept[at], former)
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &KeptProgram<C>> {
        self.kept.iter()
    }
}

/// A compiled program, with the row counts that it was sized for.
#[derive(Debug)]
pub struct KeptProgram<C> {
    compiled: Arc<C>,
    sizes: Sizes,
}

impl<C: AsRef<Program>> KeptProgram<C> {
    /// A program that has not been sized yet.
    #[must_use]
    pub fn new(compiled: Arc<C>) -> Self {
        Self { compiled, sizes: Sizes::default() }
    }

    /// The program, as its caller keeps it.
    #[must_use]
    pub const fn compiled(&self) -> &Arc<C> {
        &self.compiled
    }

    /// The program for a number of rows, kept from an earlier call or made now. The device must be current.
    ///
    /// # Errors
    /// Row counts that an op does not take (naming the op), or a product that cuBLAS lacks.
    #[inline]
    pub fn sized(&mut self, dispatcher: &mut Dispatcher, rows: usize) -> Result<Arc<SizedProgram>> {
        if let Some(sized) = self.sizes.get(rows) {
            dispatcher.trace.counters.plan_hits += 1;
            return Ok(sized);
        }
        dispatcher.trace.counters.plan_misses += 1;
        let sized = Arc::new((*self.compiled).as_ref().size(dispatcher, rows)?);
        self.sizes.insert(&sized);
        Ok(sized)
    }

    /// The programs of the kept row counts, in order of use.
    #[must_use]
    pub fn all_sized(&self) -> Vec<Arc<SizedProgram>> {
        self.sizes.all()
    }
}

/// The sized row counts of a program; the least recently used ones are evicted first.
#[derive(Debug, Default)]
struct Sizes {
    list: FxHashMap<usize, (Arc<SizedProgram>, u64)>,
    last: Option<Arc<SizedProgram>>,
    time: u64,
}

impl Sizes {
    #[inline]
    fn get(&mut self, rows: usize) -> Option<Arc<SizedProgram>> {
        if let Some(last) = self.last.as_ref().filter(|last| last.rows() == rows) {
            return Some(Arc::clone(last));
        }
        self.time += 1;
        let (sized, used) = self.list.get_mut(&rows)?;
        *used = self.time;
        self.last = Some(Arc::clone(sized));
        self.last.clone()
    }

    fn insert(&mut self, sized: &Arc<SizedProgram>) {
        if self.list.len() >= ROW_COUNTS {
            let oldest = self.list.iter().min_by_key(|(_, (_, used))| *used).map(|(&rows, _)| rows);
            oldest.map(|rows| self.list.remove(&rows));
        }
        self.time += 1;
        self.list.insert(sized.rows(), (Arc::clone(sized), self.time));
        self.last = Some(Arc::clone(sized));
    }

    /// In order of use; the last used one is at the end.
    fn all(&self) -> Vec<Arc<SizedProgram>> {
        let mut list: Vec<_> = self.list.values().collect();
        list.sort_unstable_by_key(|(_, used)| *used);
        list.into_iter().map(|(sized, _)| Arc::clone(sized)).collect()
    }
}

#[cfg(test)]
mod tests {
    use te_fast_kernels::Float;

    use super::*;
    use crate::base::config::Config;
    use crate::base::dtype::Device;
    use crate::program::chain::{Chain, Op, OuterKinds, ProgramKey};

    #[test]
    fn the_program_used_longest_ago_goes_first() -> Result<()> {
        let config = Config {
            synchronise: false,
            check_device: true,
            exchange_table: true,
            graphs: true,
            weights_together: true,
        };
        let mut dispatcher = Dispatcher::new(config);
        let mut chain = Chain::default();
        chain.push("0".into(), Op::Identity);
        let mut cache = ProgramCache::default();
        let mut call = |cols: usize| -> Result<Option<usize>> {
            if cache.find(|program: &Program| program.key().cols == cols).is_some() {
                return Ok(None);
            }
            let (activation, device) = (Float::F32, Device::Cpu);
            let (params, extras, linears) = (Vec::new(), Vec::new(), Vec::new());
            let key = ProgramKey {
                epoch: None,
                cols,
                activation,
                device,
                any_rows: false,
                input_grad: false,
                params,
                extras,
                linears,
                outer: OuterKinds::default(),
            };
            let program = Arc::new(Program::new(&mut dispatcher, &chain, key, None)?);
            Ok(Some(cache.insert(program).1.map_or(0, |former| former.key().cols)))
        };
        for cols in 1..=PROGRAMS {
            assert_eq!(call(cols)?, Some(0));
        }
        for cols in [PROGRAMS, 1, 2] {
            assert_eq!(call(cols)?, None);
        }
        // 1 and 2 were used since: 3 is the next to go, then 4.
        assert_eq!((call(1000)?, call(1001)?), (Some(3), Some(4)));
        Ok(())
    }
}
