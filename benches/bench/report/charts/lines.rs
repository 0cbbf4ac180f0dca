//! A chart with several lines that share an x axis.

use std::path::Path;

use plotters::coord::ranged1d::ValueFormatter;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

use super::{BACKGROUND, FAINT, INK, WIDTH};

pub(super) struct Lines {
    pub(super) title: String,
    pub(super) x_unit: &'static str,
    pub(super) y_unit: &'static str,
    /// Labels for the x axis. Present if the x values are indexes of categories rather than
    /// numbers.
    pub(super) x_labels: Option<[&'static str; 5]>,
    /// Whether the y axis is logarithmic.
    pub(super) logarithmic: bool,
    pub(super) lines: Vec<Line>,
    /// The range of x values to highlight, such as the duration of an outage.
    pub(super) shaded: Option<(f64, f64)>,
    pub(super) shade_label: &'static str,
}

pub(super) struct Line {
    pub(super) label: String,
    pub(super) colour: RGBColor,
    pub(super) dashed: bool,
    pub(super) points: Vec<(f64, f64)>,
}

const HEIGHT: u32 = 420;
const HEADER: u32 = 76;

impl Lines {
    pub(super) fn draw(&self, path: &Path) {
        let root = SVGBackend::new(path, (WIDTH, HEIGHT)).into_drawing_area();
        root.fill(&BACKGROUND).unwrap();
        super::title(&root, &self.title);
        let legend = self.lines.iter();
        super::legend(
            &root,
            legend.map(|line| (line.label.as_str(), line.colour, line.dashed)),
        );
        let (_, below) = root.split_vertically(HEADER);

        let most = |axis: fn(&(f64, f64)) -> f64| {
            let points = self.lines.iter().flat_map(|line| &line.points);
            points.map(axis).fold(1e-9, f64::max)
        };
        let x = 0.0..most(|point| point.0) * 1.02;
        let mut builder = ChartBuilder::on(&below);
        builder
            .margin(16)
            .x_label_area_size(48)
            .y_label_area_size(64);
        if self.logarithmic {
            let values = self.lines.iter().flat_map(|line| &line.points);
            let least = values.map(|point| point.1).fold(f64::INFINITY, f64::min);
            let y = (least.max(1e-3) / 2.0..most(|point| point.1) * 1.5).log_scale();
            self.plot(builder.build_cartesian_2d(x, y).unwrap());
        } else {
            let y = 0.0..most(|point| point.1) * 1.15;
            self.plot(builder.build_cartesian_2d(x, y).unwrap());
        }
        root.present().unwrap();
    }

    fn plot<Y>(&self, mut chart: ChartContext<'_, SVGBackend<'_>, Cartesian2d<RangedCoordf64, Y>>)
    where
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        let x_label = |x: &f64| match self.x_labels {
            None => number(*x),
            Some(labels) => labels
                .iter()
                .zip(0_i32..)
                .find(|(_, place)| (f64::from(*place) - x).abs() < 0.01)
                .map_or_else(String::new, |(label, _)| (*label).to_owned()),
        };
        chart
            .configure_mesh()
            .x_labels(6)
            .y_labels(6)
            .x_label_formatter(&x_label)
            .y_label_formatter(&|y| number(*y))
            .x_desc(self.x_unit)
            .y_desc(self.y_unit)
            .label_style(("sans-serif", 13, &INK))
            .axis_desc_style(("sans-serif", 13, &INK))
            .bold_line_style(FAINT)
            .light_line_style(TRANSPARENT)
            .axis_style(FAINT)
            .draw()
            .unwrap();
        if let Some((from, to)) = self.shaded {
            let range = chart.y_range();
            let corners = [(from, range.start), (to, range.end)];
            let shade = Rectangle::new(corners, FAINT.mix(0.5).filled());
            chart.draw_series([shade]).unwrap();
            let font = ("sans-serif", 13).into_font().color(&INK);
            let text = Text::new(self.shade_label, (from, range.end), font);
            chart.draw_series([text]).unwrap();
        }
        for line in &self.lines {
            let style = line.colour.stroke_width(2);
            let points = line.points.iter().copied();
            if line.dashed {
                chart
                    .draw_series(DashedLineSeries::new(points, 6, 4, style))
                    .unwrap();
            } else {
                chart.draw_series(LineSeries::new(points, style)).unwrap();
            }
            if self.x_labels.is_some() {
                let dots = line
                    .points
                    .iter()
                    .map(|point| Circle::new(*point, 4, line.colour.filled()));
                chart.draw_series(dots).unwrap();
            }
        }
    }
}

/// Formats a number, rounded so that floating-point errors such as 0.30000000000000004 don't show.
fn number(number: f64) -> String {
    format!("{}", (number * 1e6).round() / 1e6)
}
