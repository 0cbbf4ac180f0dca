//! A chart of horizontal bars.

use std::path::Path;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{BACKGROUND, FAINT, INK, WIDTH};
use crate::report::numbers::whole;

pub(super) struct Bars {
    pub(super) title: String,
    /// The unit shown on the x axis.
    pub(super) unit: &'static str,
    pub(super) bars: Vec<Bar>,
    /// The legend's labels and colours. Empty if the labels next to the bars suffice.
    pub(super) legend: Vec<(&'static str, RGBColor)>,
}

pub(super) struct Bar {
    pub(super) label: String,
    pub(super) segments: Vec<Segment>,
    /// The lowest and highest result of all rounds.
    pub(super) spread: Option<(f64, f64)>,
    /// The text shown after the end of the bar.
    pub(super) text: String,
}

pub(super) struct Segment {
    pub(super) length: f64,
    pub(super) colour: RGBColor,
}

/// The height of a bar including the space around it, in pixels.
const PITCH: u32 = 34;
const TITLE: u32 = 52;
const LEGEND: u32 = 24;
const FOOTER: u32 = 60;
const LABELS: u32 = 190;

impl Bars {
    pub(super) fn draw(&self, path: &Path) {
        let count = u32::try_from(self.bars.len()).unwrap();
        let header = TITLE + if self.legend.is_empty() { 0 } else { LEGEND };
        let size = (WIDTH, header + count * PITCH + FOOTER);
        let root = SVGBackend::new(path, size).into_drawing_area();
        root.fill(&BACKGROUND).unwrap();
        self.head(&root);

        let longest = self.bars.iter().map(Bar::end).fold(0.0, f64::max).max(1e-9);
        let rows = f64::from(count);
        let (_, below) = root.split_vertically(header);
        let mut chart = ChartBuilder::on(&below)
            .margin_left(LABELS)
            .margin_right(20)
            .margin_bottom(14)
            .x_label_area_size(FOOTER - 14)
            // Leaves space for the text after the longest bar. The y axis is reversed, so that the
            // first bar is at the top.
            .build_cartesian_2d(0.0..longest * 1.18, rows..0.0)
            .unwrap();
        chart
            .configure_mesh()
            .disable_y_axis()
            .disable_y_mesh()
            .x_labels(6)
            .x_label_formatter(&|x| axis_number(*x, longest))
            .label_style(("sans-serif", 13, &INK))
            .axis_desc_style(("sans-serif", 13, &INK))
            .x_desc(self.unit)
            .bold_line_style(FAINT)
            .light_line_style(TRANSPARENT)
            .axis_style(FAINT)
            .draw()
            .unwrap();

        let (left, right) = (
            Pos::new(HPos::Left, VPos::Center),
            Pos::new(HPos::Right, VPos::Center),
        );
        let font = |anchor| ("sans-serif", 14).into_font().color(&INK).pos(anchor);
        for (bar, row) in self.bars.iter().zip(0_u32..) {
            let row = f64::from(row);
            let mut start = 0.0;
            for segment in &bar.segments {
                let corners = [(start, row + 0.18), (start + segment.length, row + 0.82)];
                let shape = Rectangle::new(corners, segment.colour.filled());
                chart.draw_series([shape]).unwrap();
                start += segment.length;
            }
            if let Some((least, most)) = bar.spread {
                let whisker = PathElement::new([(least, row + 0.5), (most, row + 0.5)], INK);
                chart.draw_series([whisker]).unwrap();
            }
            let plot = chart.plotting_area();
            let (x, y) = plot.map_coordinate(&(0.0, row + 0.5));
            root.draw_text(&bar.label, &font(right), (x - 8, y))
                .unwrap();
            let (x, y) = plot.map_coordinate(&(bar.end(), row + 0.5));
            root.draw_text(&bar.text, &font(left), (x + 8, y)).unwrap();
        }
        root.present().unwrap();
    }

    fn head<DB: DrawingBackend>(&self, root: &DrawingArea<DB, Shift>) {
        super::title(root, &self.title);
        super::legend(
            root,
            self.legend
                .iter()
                .map(|(label, colour)| (*label, *colour, false)),
        );
    }
}

impl Bar {
    fn end(&self) -> f64 {
        let length: f64 = self.segments.iter().map(|segment| segment.length).sum();
        self.spread.map_or(length, |(_, most)| most.max(length))
    }
}

fn axis_number(number: f64, longest: f64) -> String {
    if longest < 10.0 {
        format!("{number:.1}")
    } else {
        whole(number)
    }
}
