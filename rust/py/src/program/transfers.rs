//! Tensors that travel between ranks beside a call, and Python's functions for the pauses of its launches.

use pyo3::prelude::*;
use te_fast_core::Error;
use te_fast_core::base::dtype::Device;
use te_fast_core::program::{FlowName, Pause, Script, SizedProgram, Transfer};
use te_fast_core::runtime::dispatcher::Dispatcher;
use te_fast_core::runtime::lane::{External, Place};

use crate::error::Failure;
use crate::torch::process::State;
use crate::torch::reader::view_of;

/// A transfer as Python describes it: this rank's rows of an arriving input and the first one's number, or the ends of
/// the blocks of columns in which the result leaves; and the function to call at each pause, for results with the pause's
/// number and the result.
#[derive(Debug, FromPyObject)]
pub(crate) enum Described<'py> {
    /// Rows arrive.
    #[pyo3(transparent)]
    Arriving((Bound<'py, PyAny>, usize, Bound<'py, PyAny>)),
    /// Columns leave.
    #[pyo3(transparent)]
    Leaving((Vec<usize>, Bound<'py, PyAny>)),
}

impl Described<'_> {
    /// The same for the core.
    fn read(&self, state: &State) -> Result<Transfer<'_>, Failure> {
        Ok(match self {
            Self::Arriving((own, begin, _)) => {
                let view = view_of(&state.reader, own, "this rank's rows")?;
                Transfer::Arriving { own: view.data(), begin: *begin, rows: view.rows() }
            }
            Self::Leaving((ends, _)) => Transfer::Leaving(ends.clone()),
        })
    }
}

/// The transfers of a call; most calls have none.
#[derive(Debug, Default)]
pub(crate) struct Transfers<'py> {
    all: Vec<Described<'py>>,
    /// Whether products are cut even if that does not pay.
    always: bool,
}

impl<'py> Transfers<'py> {
    pub(crate) fn new(given: Option<(Vec<Described<'py>>, bool)>) -> Self {
        given.map_or_else(Self::default, |(all, always)| Self { all, always })
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// The memory of a call: with pauses, other calls may use the stream's own in between.
    #[inline]
    pub(crate) fn external(&self, place: Place, scratch: usize) -> te_fast_core::Result<External> {
        if self.is_empty() {
            Dispatcher::external_bytes(place, scratch)
        } else {
            Dispatcher::external_paused(place, scratch)
        }
    }

    /// The script of a flow, which is made at the beginning.
    pub(crate) fn script<'s, 'a>(
        &'a self,
        state: &State,
        dispatcher: &mut Dispatcher,
        (sized, flow, device): (&SizedProgram, FlowName, Device),
        made: &'s mut Option<Script<'a>>,
    ) -> Result<&'s mut Script<'a>, Failure> {
        if made.is_none() {
            *made = Some(sized.script(dispatcher, device, flow, (&self.read(state)?, self.always))?);
        }
        made.as_mut().ok_or_else(|| Error::state("a transfer", "no script; report this").into())
    }

    fn read(&self, state: &State) -> Result<Vec<Transfer<'_>>, Failure> {
        self.all.iter().map(|given| given.read(state)).collect()
    }

    /// Waits for all rows that arrive.
    pub(crate) fn wait(&self) -> PyResult<()> {
        self.all.iter().try_for_each(|given| match given {
            Described::Arriving((.., wait)) => wait.call0().map(drop),
            Described::Leaving(_) => Ok(()),
        })
    }

    /// Lets Python act at a pause; a leaving transfer takes the result that is being computed.
    pub(crate) fn act(&self, pause: Pause, result: Option<&Bound<'py, PyAny>>) -> PyResult<()> {
        match &self.all[pause.transfer] {
            Described::Arriving((.., wait)) => wait.call0(),
            Described::Leaving((_, send)) => send.call1((pause.number, result)),
        }
        .map(drop)
    }
}
