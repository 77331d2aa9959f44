//! The native half of a linear layer: what it keeps between calls (plans, the quantised weight, amax slots).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use te_fast_core::autocast::{AmaxSlots, Region};
use te_fast_core::layer::PlanCache;
use te_fast_core::linear::{LinearPlan, Slot};
use te_fast_core::tensor::TensorView;

use crate::replay::Replay;
use crate::state::contiguous_strides;
use crate::weight::{CachedWeight, Described, WeightCache};

/// Shapes of one layer that are kept as tuples.
const GEOMETRIES: usize = 64;

/// Delayed-scaling slots of a layer, valid for one epoch.
#[derive(Clone, Debug)]
pub(crate) struct Slots {
    pub(crate) epoch: u64,
    pub(crate) forward: Arc<AmaxSlots>,
    pub(crate) backward: Arc<AmaxSlots>,
}

impl Slots {
    /// Whether calls in regions of `epoch` may use them: they are its layer's still.
    #[inline]
    pub(crate) fn serve(&self, epoch: u64) -> bool {
        self.epoch == epoch && !self.forward.is_retired() && !self.backward.is_retired()
    }
}

/// One tensor's slot out of a direction's.
pub(crate) fn slot(slots: &AmaxSlots, index: usize) -> Slot<'_> {
    Slot { scale: slots.scale().offset(4 * index), amax: slots.history().offset(4 * index) }
}

/// Shapes of one call as Python tuples, so that a forward builds none.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
pub(crate) struct Geometry {
    x: Vec<i64>,
    pub(crate) x_size: Py<PyTuple>,
    pub(crate) x_stride: Py<PyTuple>,
    pub(crate) y_size: Py<PyTuple>,
    pub(crate) y_stride: Py<PyTuple>,
}

/// A number for a weight gradient that is put off, ascending over all of the process: a layer's wait in several places,
/// and the oldest comes first.
#[pyfunction]
pub(crate) fn deferral_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A weight gradient put off until `backward_dw`.
#[derive(Debug)]
pub(crate) struct DeferredWeightGrad {
    pub(crate) number: u64,
    pub(crate) plan: Arc<LinearPlan>,
    pub(crate) saved: Option<Py<PyAny>>,
    pub(crate) x: Option<Py<PyAny>>,
    pub(crate) kept_dy: Py<PyAny>,
    pub(crate) overwrite_main_grad: bool,
}

/// Fixed properties of a layer.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "constructor flags that do not depend on each other")]
pub(crate) struct LayerConfig {
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
    pub(crate) apply_bias: bool,
    pub(crate) return_bias: bool,
    pub(crate) fuse_wgrad_accumulation: bool,
    pub(crate) delay_wgrad_compute: bool,
    /// One weight and at most one bias, in `_parameters["weight"]` and `_parameters["bias"]`.
    pub(crate) whole: bool,
}

/// The native half of a linear layer.
#[pyclass(module = "te_fast._native", name = "LinearHandle")]
#[derive(Debug)]
pub(crate) struct LinearHandle {
    pub(crate) config: LayerConfig,
    pub(crate) save_original_input: bool,
    /// Version of the next call's weight, where that is a concatenation without one of its own.
    pub(crate) version: Option<u64>,
    pub(crate) name: String,
    pub(crate) cache: WeightCache,
    pub(crate) slots: Option<Slots>,
    /// Scales of the next call, if that is a recomputation.
    pub(crate) replay: Option<Replay>,
    pub(crate) deferred: VecDeque<DeferredWeightGrad>,
    /// Region of the last forward, if that was in FP8: what a recomputation during backward repeats.
    pub(crate) last_region: Option<Region>,
    /// Plans, and the size of what each keeps for backward as a tuple.
    pub(crate) plans: PlanCache<Option<Py<PyTuple>>>,
    geometries: Vec<Py<Geometry>>,
    weight_size: Py<PyTuple>,
    weight_stride: Py<PyTuple>,
    bias_size: Py<PyTuple>,
    unit_stride: Py<PyTuple>,
}

impl LinearHandle {
    /// Tuples for an input of this shape.
    #[inline]
    pub(crate) fn geometry(&mut self, py: Python<'_>, x: &TensorView<'_>) -> PyResult<Py<Geometry>> {
        if let Some(known) = self.geometries.iter().rev().find(|known| known.get().x == x.shape()) {
            return Ok(known.clone_ref(py));
        }
        let x_size = x.shape().to_vec();
        let mut y_size = x_size.clone();
        if let Some(last) = y_size.last_mut() {
            *last = self.config.out_features as i64;
        }
        let geometry = Py::new(
            py,
            Geometry {
                x_size: PyTuple::new(py, &x_size)?.unbind(),
                x_stride: PyTuple::new(py, contiguous_strides(&x_size))?.unbind(),
                y_stride: PyTuple::new(py, contiguous_strides(&y_size))?.unbind(),
                y_size: PyTuple::new(py, y_size)?.unbind(),
                x: x_size,
            },
        )?;
        if self.geometries.len() >= GEOMETRIES {
            self.geometries.remove(0);
        }
        self.geometries.push(geometry.clone_ref(py));
        Ok(geometry)
    }

    /// Size and stride tuples of the weight's gradient.
    pub(crate) fn weight_tuples<'py>(&self, py: Python<'py>) -> (Bound<'py, PyTuple>, Bound<'py, PyTuple>) {
        (self.weight_size.bind(py).clone(), self.weight_stride.bind(py).clone())
    }

    /// Size and stride tuples of the bias's gradient.
    pub(crate) fn bias_tuples<'py>(&self, py: Python<'py>) -> (Bound<'py, PyTuple>, Bound<'py, PyTuple>) {
        (self.bias_size.bind(py).clone(), self.unit_stride.bind(py).clone())
    }
}

#[pymethods]
impl LinearHandle {
    #[new]
    #[pyo3(signature = (name, in_features, out_features, *, apply_bias, return_bias, fuse_wgrad_accumulation, delay_wgrad_compute, whole))]
    #[expect(clippy::too_many_arguments, clippy::fn_params_excessive_bools, reason = "a Python constructor's keywords")]
    fn new(
        py: Python<'_>,
        name: String,
        in_features: usize,
        out_features: usize,
        apply_bias: bool,
        return_bias: bool,
        fuse_wgrad_accumulation: bool,
        delay_wgrad_compute: bool,
        whole: bool,
    ) -> PyResult<Self> {
        let config = LayerConfig {
            in_features,
            out_features,
            apply_bias,
            return_bias,
            fuse_wgrad_accumulation,
            delay_wgrad_compute,
            whole,
        };
        Ok(Self {
            config,
            save_original_input: false,
            version: None,
            name,
            cache: WeightCache::default(),
            slots: None,
            replay: None,
            deferred: VecDeque::new(),
            last_region: None,
            plans: PlanCache::default(),
            geometries: Vec::new(),
            weight_size: PyTuple::new(py, [out_features, in_features])?.unbind(),
            weight_stride: PyTuple::new(py, [in_features, 1])?.unbind(),
            bias_size: PyTuple::new(py, [out_features])?.unbind(),
            unit_stride: PyTuple::new(py, [1])?.unbind(),
        })
    }

    /// Name in messages.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn save_original_input(&self) -> bool {
        self.save_original_input
    }

    #[setter]
    fn set_save_original_input(&mut self, value: bool) {
        self.save_original_input = value;
    }

    /// Forgets the quantised weight: the next forward quantises it again.
    fn drop_weight_cache(slf: &Bound<'_, Self>) -> PyResult<()> {
        let former = slf.try_borrow_mut()?.cache.clear();
        drop(former);
        Ok(())
    }

    /// Forgets amax slots and plans: the next forward sets them up again.
    fn drop_slots(&mut self) {
        self.slots = None;
        self.plans.clear();
    }

    /// Uses these delayed-scaling slots for regions of `epoch`.
    fn set_slots(
        &mut self,
        epoch: u64,
        forward: &crate::autocast::SlotsHandle,
        backward: &crate::autocast::SlotsHandle,
    ) -> PyResult<()> {
        let (forward, backward) = (forward.slots(&self.name, true, 2)?, backward.slots(&self.name, false, 1)?);
        self.slots = Some(Slots { epoch, forward, backward });
        Ok(())
    }

    /// Number of weight gradients that wait for `backward_dw`.
    fn deferred_count(&self) -> usize {
        self.deferred.len()
    }

    /// [`deferral_number`] of the first of them, or None.
    fn oldest_deferral(&self) -> Option<u64> {
        self.deferred.front().map(|deferred| deferred.number)
    }

    /// Number of plans held.
    fn plan_count(&self) -> usize {
        self.plans.len()
    }

    /// The quantised weight: (buffer, bytes, has row layout, has column layout), or None.
    fn weight_cache<'py>(&self, py: Python<'py>) -> PyResult<Option<Described<'py>>> {
        self.cache.describe(py)
    }
}

/// What a backward needs of its forward, beside the saved tensors.
#[pyclass(module = "te_fast._native", frozen)]
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts of one forward that do not depend on each other")]
pub(crate) struct LinearSaved {
    pub(crate) plan: Arc<LinearPlan>,
    pub(crate) handle: Py<LinearHandle>,
    pub(crate) geometry: Py<Geometry>,
    pub(crate) weight: Arc<CachedWeight>,
    /// The weight, for its `main_grad` and to see whether it was changed since.
    pub(crate) weight_object: Py<PyAny>,
    /// torch's version of it in forward; none for inference tensors and concatenations.
    pub(crate) weight_version: Option<u64>,
    pub(crate) slots: Option<Slots>,
    /// `is_first_microbatch=True`: `main_grad` is overwritten.
    pub(crate) overwrite_main_grad: bool,
    /// This layer was the first FP8 module of its region: its backward is the last, and updates the scales.
    pub(crate) updates_backward_scales: bool,
    pub(crate) bias_grad: bool,
    pub(crate) fuse_wgrad_accumulation: bool,
}
